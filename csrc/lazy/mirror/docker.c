/* SPDX-License-Identifier: MIT */
#include "lazy/mirror/docker.h"

#include <ctype.h>
#include <errno.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/cleanup.h"
#include "base/json_text.h"
#include "lazy/mirror/helper.h"
#include "lazy/mirror/secret.h"

enum { HELPER_TIMEOUT_MS = 10000 };

/* The user's name that helpers give when the secret is a token and no password. */
static const char token_user[] = "<token>";

static void free_json(json_t **object)
{
	json_decref(*object);
}

#define _cleanup_json_ _cleanup_(free_json)

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
	return err ? err : copy(&login->password, secret, error);
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
	if (err)
		return err;
	if (!status)
		return parse_helped(login, name, &output, error);
	if (strstr(output.text, HELPER_HAS_NONE))
		return 0;
	return error_set(error, -EACCES, "%s get has ended with status %d", program, status);
}

/* Keys have been written both with and without a scheme and a path. */
static bool is_key_of(const char *key, const char *registry)
{
	size_t length = strlen(registry);
	const char *rest = strstr(key, "://");

	key = rest ? rest + 3 : key;
	return !strncmp(key, registry, length) && (!key[length] || key[length] == '/');
}

static const json_t *find_entry(const json_t *entries, const char *registry)
{
	const json_t *entry = json_object_get(entries, registry);
	const char *key;
	json_t *value;

	if (entry)
		return entry;
	json_object_foreach ((json_t *)entries, key, value) {
		if (is_key_of(key, registry))
			return value;
	}
	return NULL;
}

static int find_in(const json_t *config, const char *path, const char *registry, uint64_t *seen,
		   struct docker_login *login, struct error *error)
{
	/* The Hub's entry is older than the name docker.io. */
	const char *hub = strcmp(registry, "docker.io") ? NULL : "index.docker.io";
	const char *key = hub ? "https://index.docker.io/v1/" : registry;
	const char *helper = text_of(json_object_get(config, "credHelpers"), registry);
	const json_t *entry;

	if (!helper)
		helper = text_of(config, "credsStore");
	if (helper)
		return ask_helper(login, helper, key, seen, error);
	entry = find_entry(json_object_get(config, "auths"), hub ? hub : registry);
	return entry ? take_entry(login, entry, path, error) : 0;
}

/* Returns the path of Docker's own file, or NULL when no home directory is known. */
static char *usual_path(void)
{
	const char *directory = getenv("DOCKER_CONFIG");
	const char *home = getenv("HOME");
	char *path = NULL;
	int length = -1;

	if (directory && *directory == '/')
		length = asprintf(&path, "%s/config.json", directory);
	else if (home && *home == '/')
		length = asprintf(&path, "%s/.docker/config.json", home);
	return length < 0 ? NULL : path;
}

int docker_login_find(const char *path, const char *registry, uint64_t *seen,
		      struct docker_login *login, struct error *error)
{
	_cleanup_(secret_clear) struct secret file = {};
	_cleanup_free_ char *usual = path ? NULL : usual_path();
	_cleanup_json_ json_t *config = NULL;
	json_error_t json_error;
	int err;

	if (!path && (!usual || access(usual, F_OK)))
		return 0;
	path = path ? path : usual;
	err = secret_read(path, true, &file, error);
	if (err)
		return err;
	config = json_text_parse(file.text, file.length, 0, &json_error);
	if (!json_is_object(config))
		return error_set(error, -EINVAL, "'%s' is no JSON object (line %d)", path,
				 json_error.line);
	err = find_in(config, path, registry, seen, login, error);
	if (err)
		docker_login_clear(login);
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
