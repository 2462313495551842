/* SPDX-License-Identifier: MIT */
#include "fetch/mirror/awsconfig.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/cleanup.h"

static int put(char **place, const char *text, struct error *error)
{
	secret_free(*place);
	*place = strdup(text);
	return *place ? 0 : error_set(error, -ENOMEM, "no memory for credentials");
}

/* Removes spaces on both sides. */
static char *trim(char *text)
{
	char *end;

	text += strspn(text, " \t\r");
	end = text + strlen(text);
	while (end > text && strchr(" \t\r", end[-1]))
		end--;
	*end = 0;
	return text;
}

/* NULL: there is no session. */
static int put_session(struct login *login, const char *token, struct error *error)
{
	return token && login_add_header(login, "x-amz-security-token: %s", token) ?
		       error_set(error, -ENOMEM, "no memory for credentials") :
		       0;
}

static void free_secret(char **text)
{
	secret_free(*text);
}

static int take_pair(struct login *login, char **token, char *line, struct error *error)
{
	char *equals = strchr(line, '=');
	char *name, *value;

	if (!equals)
		return 0;
	*equals = 0;
	name = trim(line);
	value = trim(equals + 1);
	if (!strcmp(name, "aws_access_key_id"))
		return put(&login->user, value, error);
	if (!strcmp(name, "aws_secret_access_key"))
		return put(&login->password, value, error);
	if (!strcmp(name, "aws_session_token"))
		return put(token, value, error);
	return 0;
}

/* Returns the name in "[name]", or NULL. */
static const char *section_of(char *line)
{
	size_t length;

	line = trim(line);
	length = strlen(line);
	if (length < 2 || line[0] != '[' || line[length - 1] != ']')
		return NULL;
	line[length - 1] = 0;
	return trim(line + 1);
}

static int parse(struct secret *file, const char *profile, struct login *login, char **token,
		 struct error *error)
{
	bool wanted = false;
	char *next = NULL;
	int err = 0;

	for (char *line = strtok_r(file->text, "\n", &next); line && !err;
	     line = strtok_r(NULL, "\n", &next)) {
		const char *section = line[strspn(line, " \t")] == '[' ? section_of(line) : NULL;

		if (section)
			wanted = !strcmp(section, profile);
		else if (wanted && !strchr("#;", line[strspn(line, " \t")]))
			err = take_pair(login, token, line, error);
	}
	return err;
}

static int read_file(const char *path, const char *profile, struct login *login,
		     struct error *error)
{
	_cleanup_(secret_clear) struct secret file = {};
	_cleanup_(free_secret) char *token = NULL;
	int err = secret_read(path, true, &file, error);

	if (err)
		return err;
	err = parse(&file, profile, login, &token, error);
	if (!err && (!login->user || !login->password))
		err = error_set(error, -ENOKEY, "'%s' has no key for the profile '%s'", path,
				profile);
	if (!err && (strpbrk(login->user, ":/ \t") || !*login->user))
		err = error_set(error, -EINVAL, "'%s': the name of the key of '%s' is not valid",
				path, profile);
	return err ?: put_session(login, token, error);
}

static const char *variable(const char *name)
{
	const char *value = getenv(name);

	return value && *value ? value : NULL;
}

static int read_environment(struct login *login, struct error *error)
{
	const char *token = variable("AWS_SESSION_TOKEN");
	int err = put(&login->user, variable("AWS_ACCESS_KEY_ID"), error);

	if (!err)
		err = put(&login->password, variable("AWS_SECRET_ACCESS_KEY"), error);
	return err ?: put_session(login, token, error);
}

static char *usual_path(void)
{
	const char *named = variable("AWS_SHARED_CREDENTIALS_FILE");
	const char *home = variable("HOME");
	char *path = NULL;

	if (named)
		return strdup(named);
	if (!home || asprintf(&path, "%s/.aws/credentials", home) < 0)
		return NULL;
	return path;
}

int aws_login_read(const char *path, const char *profile, struct login *login, struct error *error)
{
	_cleanup_free_ char *usual = NULL;

	if (!path && !profile && variable("AWS_ACCESS_KEY_ID") && variable("AWS_SECRET_ACCESS_KEY"))
		return read_environment(login, error);
	if (!path)
		path = usual = usual_path();
	if (!profile && usual)
		profile = variable("AWS_PROFILE");
	if (!path || (usual && access(usual, F_OK))) {
		error_set_hint(error, "name a \"credentials_file\", or say \"anonymous\": true");
		return error_set(error, -ENOKEY, "there are no credentials for S3");
	}
	return read_file(path, profile ? profile : "default", login, error);
}
