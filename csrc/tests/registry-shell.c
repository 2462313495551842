/* SPDX-License-Identifier: MIT */
/*
 * What the oci mirror makes of configuration files and refusals, without a registry. Driven from
 * standard input, line by line:
 *
 *   login REGISTRY REPOSITORY [CONFIG]   the login for an image; without a file, from the usual ones
 *   refused URL                          the challenge of the headers in the lines up to an empty one
 *
 * Each answer is a JSON object on a line.
 */
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fetch/mirror/challenge.h"
#include "fetch/mirror/docker.h"
#include "fetch/mirror/response.h"

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

static void read_challenge(const char *url)
{
	struct response response;
	struct challenge challenge;
	char line[65536];

	response_reset(&response);
	while (fgets(line, sizeof(line), stdin) && *line != '\n')
		response_line(&response, line, strlen(line));
	if (challenge_parse(response.challenges, url, &challenge))
		abort();
	answer(json_pack("{sb sb ss? ss? ss?}", "bearer", challenge.bearer, "basic",
			 challenge.basic, "realm", challenge.realm, "service", challenge.service,
			 "scope", challenge.scope));
	challenge_clear(&challenge);
}

int main(void)
{
	char line[65536];

	while (fgets(line, sizeof(line), stdin)) {
		const char *command = strtok(line, " \n"), *first = strtok(NULL, " \n"),
			   *second = strtok(NULL, " \n");

		if (command && first && !strcmp(command, "refused"))
			read_challenge(first);
		else if (command && second && !strcmp(command, "login"))
			find_login(first, second, strtok(NULL, " \n"));
		else
			return 2;
	}
	return 0;
}
