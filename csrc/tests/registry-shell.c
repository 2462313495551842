/* SPDX-License-Identifier: MIT */
/*
 * What the oci mirror makes of configuration files, without a registry. Driven from standard input,
 * line by line:
 *
 *   login REGISTRY REPOSITORY [CONFIG]   the login for an image; without a file, from the usual ones
 *
 * Each answer is a JSON object on a line.
 */
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "lazy/mirror/docker.h"

static void answer(json_t *object)
{
	if (!object || json_dumpf(object, stdout, JSON_COMPACT))
		abort();
	json_decref(object);
	puts("");
	fflush(stdout);
}

static void find_login(const char *registry, const char *repository, const char *path)
{
	struct docker_login login = {};
	struct error error = {};
	uint64_t seen = 0;
	int err = docker_login_find(path, registry, repository, &seen, &login, &error);

	if (err)
		answer(json_pack("{si ss ss}", "result", err, "text", error.text, "hint",
				 error.hint));
	else
		answer(json_pack("{si ss? ss? ss? ss?}", "result", 0, "user", login.user,
				 "password", login.password, "identity_token", login.identity_token,
				 "registry_token", login.registry_token));
	docker_login_clear(&login);
}

int main(void)
{
	char line[65536];

	while (fgets(line, sizeof(line), stdin)) {
		const char *command = strtok(line, " \n"), *registry = strtok(NULL, " \n"),
			   *repository = strtok(NULL, " \n");

		if (!command || strcmp(command, "login") != 0 || !repository)
			return 2;
		find_login(registry, repository, strtok(NULL, " \n"));
	}
	return 0;
}
