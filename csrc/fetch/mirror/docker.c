/* SPDX-License-Identifier: MIT */
#include "fetch/mirror/docker.h"

#include <ctype.h>
#include <errno.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/cleanup.h"
#include "base/json_text.h"
#include "base/message.h"
#include "fetch/mirror/helper.h"
#include "fetch/mirror/login_key.h"
#include "fetch/mirror/secret.h"

enum { HELPER_TIMEOUT_MS = 10000, USUAL_PATHS = 4 };

struct image_name {
	const char *registry, *repository;
};

struct paths {
	char *paths[USUAL_PATHS];
	unsigned count;
};

/* The user's name that helpers give when the secret is a token and no password. */
static const char token_user[] = "<token>";

static void free_json(json_t **object)
{
	json_decref(*object);
}

#define _cleanup_json_ _cleanup_(free_json)

static void free_paths(struct paths *paths)
{
	while (paths->count)
		free(paths->paths[--paths->count]);
}

static bool is_empty(const struct docker_login *login)
{
	return !login->user && !login->identity_token && !login->registry_token;
}

static const char *text_of(const json_t *object, const char *key)
{
	const char *text = json_string_value(json_object_get(object, key));

	return text && *text ? text : NULL;
}

static int copy(char **to, const char *from, struct error *error)
{
	*to = strdup(from);
	return *to ? 0 : error_set(error, -ENOMEM, "no memory for credentials");
}

static int take_pair(struct docker_login *login, const char *user, const char *secret,
		     struct error *error)
{
	int err;

	if (!strcmp(user, token_user))
		return copy(&login->identity_token, secret, error);
	err = copy(&login->user, user, error);
	return err ?: copy(&login->password, secret, error);
}

static int digit_of(char c)
{
	static const char digits[] =
		"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
	const char *found = c ? strchr(digits, c) : NULL;

	return found ? (int)(found - digits) : -1;
}

/* Decodes base64 (RFC 4648) into a string. Returns NULL when it is invalid, or memory is short. */
static char *decode(const char *text)
{
	char *plain = malloc(strlen(text) / 4 * 3 + 4);
	unsigned bits = 0, value = 0;
	size_t length = 0;

	if (!plain)
		return NULL;
	for (; *text && *text != '='; text++) {
		int digit = digit_of(*text);

		if (digit < 0) {
			free(plain);
			return NULL;
		}
		value = value << 6 | (unsigned)digit;
		bits += 6;
		if (bits >= 8) {
			bits -= 8;
			plain[length++] = (char)(value >> bits);
		}
	}
	plain[length] = 0;
	return plain;
}

static int take_encoded(struct docker_login *login, const char *encoded, const char *path,
			struct error *error)
{
	char *plain = decode(encoded);
	char *colon = plain ? strchr(plain, ':') : NULL;
	int err;

	if (colon) {
		*colon = 0;
		err = take_pair(login, plain, colon + 1, error);
		*colon = ':';
	} else {
		err = error_set(error, -EINVAL,
				"'%s' has an \"auth\" that is not base64 of \"user:password\"",
				path);
	}
	secret_free(plain);
	return err;
}

static int take_entry(struct docker_login *login, const json_t *entry, const char *path,
		      struct error *error)
{
	const char *user = text_of(entry, "username");
	const char *password = text_of(entry, "password");
	const char *token = text_of(entry, "identitytoken");

	if (token)
		return copy(&login->identity_token, token, error);
	token = text_of(entry, "registrytoken");
	if (token)
		return copy(&login->registry_token, token, error);
	if (user && password)
		return take_pair(login, user, password, error);
	if (text_of(entry, "auth"))
		return take_encoded(login, text_of(entry, "auth"), path, error);
	return 0;
}

static int parse_helped(struct docker_login *login, const char *name, const struct secret *output,
			struct error *error)
{
	_cleanup_json_ json_t *answer = json_text_parse(output->text, output->length, 0, NULL);
	const char *user = text_of(answer, "Username");
	const char *secret = text_of(answer, "Secret");

	/* NB: do not show the output, which may be half of a secret. */
	if (!user || !secret)
		return error_set(error, -EPROTO,
				 "docker-credential-%s answers without a user and a secret", name);
	return take_pair(login, user, secret, error);
}

static bool is_name(const char *name)
{
	for (const char *c = name; *c; c++) {
		if (!isalnum((unsigned char)*c) && !strchr("._-", *c))
			return false;
	}
	return *name && strlen(name) < 64;
}

static int ask_helper(struct docker_login *login, const char *name, const char *registry,
		      uint64_t *seen, struct error *error)
{
	_cleanup_(secret_clear) struct secret output = {};
	char program[100];
	const char *const arguments[] = { program, "get", NULL };
	int status, err;

	if (!is_name(name))
		return error_set(error, -EINVAL, "'%.60s' is no name of a credential helper", name);
	snprintf(program, sizeof(program), "docker-credential-%s", name);
	err = helper_ask(arguments, registry, HELPER_TIMEOUT_MS, seen, &output, &status, error);
	if (err == -ENOENT) {
		msg_warning("%s is not installed, so the login that it may have for %s is not used",
			    program, registry);
		return 0;
	}
	if (err)
		return err;
	if (!status)
		return parse_helped(login, name, &output, error);
	if (strstr(output.text, HELPER_HAS_NONE))
		return 0;
	return error_set(error, -EACCES, "%s get has ended with status %d", program, status);
}

static int find_in(const json_t *config, const char *path, const struct image_name *image,
		   uint64_t *seen, struct docker_login *login, struct error *error)
{
	/* Helpers know the Hub by a name that is older than docker.io. */
	const char *asked = strcmp(image->registry, "docker.io") ? image->registry :
								   "https://index.docker.io/v1/";
	const json_t *entry = login_key_find(json_object_get(config, "credHelpers"),
					     image->registry, image->repository);
	const char *helper = json_string_value(entry);
	int err = 0;

	if (!helper || !*helper)
		helper = text_of(config, "credsStore");
	if (helper)
		err = ask_helper(login, helper, asked, seen, error);
	if (err || !is_empty(login))
		return err;
	entry = login_key_find(json_object_get(config, "auths"), image->registry,
			       image->repository);
	return entry ? take_entry(login, entry, path, error) : 0;
}

static int find_in_file(const char *path, const struct image_name *image, uint64_t *seen,
			struct docker_login *login, struct error *error)
{
	_cleanup_(secret_clear) struct secret file = {};
	_cleanup_json_ json_t *config = NULL;
	json_error_t json_error;
	int err = secret_read(path, true, &file, error);

	if (err)
		return err;
	config = json_text_parse(file.text, file.length, 0, &json_error);
	if (!json_is_object(config))
		return error_set(error, -EINVAL, "'%s' is no JSON object (line %d)", path,
				 json_error.line);
	err = find_in(config, path, image, seen, login, error);
	if (err)
		docker_login_clear(login);
	return err;
}

/* Variables of this process that are no absolute paths name nothing that others could mean, too. */
static const char *directory(const char *variable)
{
	const char *value = getenv(variable);

	return value && *value == '/' ? value : NULL;
}

static int add_path(struct paths *paths, const char *directory, const char *rest)
{
	char *path;

	if (!directory)
		return 0;
	if (asprintf(&path, "%s%s", directory, rest) < 0)
		return -ENOMEM;
	paths->paths[paths->count++] = path;
	return 0;
}

/* Fills in where Docker's client and podman keep logins, in the order that counts. */
static int usual_paths(struct paths *paths)
{
	const char *named = directory("REGISTRY_AUTH_FILE"), *docker = directory("DOCKER_CONFIG");
	const char *config = directory("XDG_CONFIG_HOME"), *home = directory("HOME");
	char run[50];
	int err;

	/* Either of them replaces all others. */
	if (named || docker)
		return add_path(paths, named ?: docker, named ? "" : "/config.json");
	snprintf(run, sizeof(run), "/run/containers/%u", geteuid());
	err = add_path(paths, directory("XDG_RUNTIME_DIR"), "/containers/auth.json");
	if (!err)
		err = add_path(paths, run, "/auth.json");
	if (!err)
		err = add_path(paths, config ?: home,
			       config ? "/containers/auth.json" : "/.config/containers/auth.json");
	if (!err)
		err = add_path(paths, home, "/.docker/config.json");
	return err;
}

int docker_login_find(const char *path, const char *registry, const char *repository,
		      uint64_t *seen, struct docker_login *login, struct error *error)
{
	const struct image_name image = { registry, repository };
	_cleanup_(free_paths) struct paths usual = {};
	int err = 0;

	if (path)
		return find_in_file(path, &image, seen, login, error);
	if (usual_paths(&usual))
		return error_set(error, -ENOMEM, "no memory for credentials");
	for (unsigned i = 0; !err && is_empty(login) && i < usual.count; i++) {
		if (!access(usual.paths[i], F_OK))
			err = find_in_file(usual.paths[i], &image, seen, login, error);
	}
	return err;
}

void docker_login_clear(struct docker_login *login)
{
	secret_free(login->user);
	secret_free(login->password);
	secret_free(login->identity_token);
	secret_free(login->registry_token);
	*login = (struct docker_login){};
}
