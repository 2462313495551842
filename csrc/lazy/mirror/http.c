/* SPDX-License-Identifier: MIT */
/*
 * An object behind a URL: `"url"` (http or https), and, each in a file that only its owner can read,
 * `"headers_file"` (lines "Name: value"), `"bearer_token_file"`, `"basic_auth_file"` ("user:password").
 * Certificates and proxy are of remote.h.
 *
 * The object is known again by its strong ETag, else by Last-Modified.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/cleanup.h"
#include "lazy/keys.h"
#include "lazy/mirror/exchange.h"
#include "lazy/mirror/object.h"

struct http_mirror {
	struct remote remote;
	char *url;
	char *headers_file, *bearer_token_file, *basic_auth_file;
};

static int add_header_line(struct login *login, const char *path, char *line,
			   struct complaint *complaint)
{
	size_t length = strcspn(line, "\r");
	const char *colon;

	line[length] = 0;
	if (!line[strspn(line, " \t")] || line[0] == '#')
		return 0;
	colon = strchr(line, ':');
	if (!colon || colon == line || strcspn(line, " \t") < (size_t)(colon - line))
		return complain(complaint, -EINVAL, "'%s' has a line that is no \"Name: value\"",
				path);
	/* An empty one would take a header of libcurl's away. */
	if (!colon[1 + strspn(colon + 1, " \t")])
		return complain(complaint, -EINVAL, "'%s' has a header without a value", path);
	return login_add_header(login, "%s", line);
}

static int load_headers(const char *path, struct login *login, struct complaint *complaint)
{
	_cleanup_(secret_clear) struct secret file = {};
	char *next = NULL;
	int err = secret_read(path, true, &file, complaint);

	if (err)
		return err;
	for (char *line = strtok_r(file.text, "\n", &next); line && !err;
	     line = strtok_r(NULL, "\n", &next))
		err = add_header_line(login, path, line, complaint);
	return err;
}

static int load_line(const char *path, char **line, struct complaint *complaint)
{
	_cleanup_(secret_clear) struct secret file = {};
	int err = secret_read(path, true, &file, complaint);

	return err ? err : secret_line(path, &file, line, complaint);
}

static int load_token(const char *path, struct login *login, struct complaint *complaint)
{
	char *token = NULL;
	int err = load_line(path, &token, complaint);

	if (!err)
		err = login_add_header(login, "Authorization: Bearer %s", token);
	secret_free(token);
	return err;
}

static int load_user(const char *path, struct login *login, struct complaint *complaint)
{
	char *colon;
	int err = load_line(path, &login->user, complaint);

	if (err)
		return err;
	colon = strchr(login->user, ':');
	if (!colon)
		return complain(complaint, -EINVAL, "'%s' is not \"user:password\"", path);
	login->password = strdup(colon + 1);
	if (!login->password)
		return complain(complaint, -ENOMEM, "no memory for '%s'", path);
	explicit_bzero(colon, strlen(colon));
	return 0;
}

static int http_load(struct remote *remote, struct login *login, struct complaint *complaint)
{
	const struct http_mirror *http = (const struct http_mirror *)remote;
	int err = 0;

	if (http->headers_file)
		err = load_headers(http->headers_file, login, complaint);
	if (!err && http->bearer_token_file)
		err = load_token(http->bearer_token_file, login, complaint);
	if (!err && http->basic_auth_file)
		err = load_user(http->basic_auth_file, login, complaint);
	return err;
}

/* The files may have been renewed since. */
static bool http_refused(struct remote *remote, const struct answer *answer)
{
	return remote->reload_ms && (answer->status == 401 || answer->status == 403);
}

static void http_prepare(const struct remote *remote, const struct login *login, CURL *easy)
{
	(void)remote;
	if (!login->user)
		return;
	curl_easy_setopt(easy, CURLOPT_HTTPAUTH, (long)CURLAUTH_BASIC);
	curl_easy_setopt(easy, CURLOPT_USERNAME, login->user);
	curl_easy_setopt(easy, CURLOPT_PASSWORD, login->password);
}

static const struct remote_ops http_remote_ops = {
	.load = http_load,
	.refused = http_refused,
	.prepare = http_prepare,
};

static int http_parse(struct mirror *mirror, json_t *keys, struct complaint *complaint)
{
	struct http_mirror *http = mirror->private;
	int err = remote_parse(&http->remote, &http_remote_ops, keys, complaint);

	if (!err)
		err = keys_take_string(keys, "url", true, &http->url, complaint);
	if (!err)
		err = url_check(http->url, "url", complaint);
	if (!err)
		err = remote_take_path(keys, "headers_file", &http->headers_file, complaint);
	if (!err)
		err = remote_take_path(keys, "bearer_token_file", &http->bearer_token_file,
				       complaint);
	if (!err)
		err = remote_take_path(keys, "basic_auth_file", &http->basic_auth_file, complaint);
	if (err)
		return err;
	if (http->bearer_token_file && http->basic_auth_file)
		return complain(complaint, -EINVAL,
				"\"bearer_token_file\" and \"basic_auth_file\" exclude each other");
	if (http->headers_file || http->bearer_token_file || http->basic_auth_file ||
	    strchr(http->url, '?'))
		secret_guard_process();
	if (!http->headers_file && !http->bearer_token_file && !http->basic_auth_file &&
	    !http->remote.ca_file && !http->remote.client_cert && !url_is_https(http->url))
		http->remote.reload_ms = 0;
	return 0;
}

static void http_close(struct mirror *mirror)
{
	struct http_mirror *http = mirror->private;

	remote_close(&http->remote);
	/* It may have a signature in its query. */
	secret_free(http->url);
	free(http->headers_file);
	free(http->bearer_token_file);
	free(http->basic_auth_file);
}

static const char *http_validator(const char *identity)
{
	return strchr(identity, ' ') + 1;
}

static char *http_url(const struct mirror *mirror)
{
	const struct http_mirror *http = mirror->private;

	return strdup(http->url);
}

static const struct object_ops http_object_ops = {
	.url = http_url,
	.identity = object_identity,
	.validator = http_validator,
};

static int http_probe(struct mirror *mirror, uint32_t timeout_ms, struct mirror_probe *probe,
		      struct complaint *complaint)
{
	return object_probe(&http_object_ops, mirror, timeout_ms, probe, complaint);
}

static void http_fetch(struct fetch *fetch)
{
	object_fetch(&http_object_ops, fetch);
}

static const char *http_host(const struct mirror *mirror, char *text, size_t bytes)
{
	const struct http_mirror *http = mirror->private;

	return url_host(http->url, text, bytes);
}

static const struct mirror_ops http_ops = {
	.name = "http",
	.private_bytes = sizeof(struct http_mirror),
	.parse = http_parse,
	.close = http_close,
	.probe = http_probe,
	.fetch = http_fetch,
	.cancel = object_cancel,
	.host = http_host,
};
MIRROR_KIND(http_ops);
