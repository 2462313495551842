/* SPDX-License-Identifier: MIT */
/*
 * An object behind a URL: `"url"` (http or https), and secrets that each come from a file which
 * only its owner can read: `"headers_file"` (lines "Name: value"), `"bearer_token_file"`,
 * `"basic_auth_file"` ("user:password"); or `"url_file"`: the URL itself, since a signed one is a
 * secret. remote.h has certificates and proxy.
 *
 * The object's identity is its ETag and Last-Modified.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/cleanup.h"
#include "base/keys.h"
#include "fetch/mirror/exchange.h"
#include "fetch/mirror/object.h"

struct http_mirror {
	struct remote remote;
	char *url; /* NULL: it is in url_file */
	char *url_file, *headers_file, *bearer_token_file, *basic_auth_file;
};

static int add_header_line(struct login *login, const char *path, char *line, struct error *error)
{
	size_t length = strcspn(line, "\r");
	const char *colon;

	line[length] = 0;
	if (!line[strspn(line, " \t")] || line[0] == '#')
		return 0;
	colon = strchr(line, ':');
	if (!colon || colon == line || strcspn(line, " \t") < (size_t)(colon - line))
		return error_set(error, -EINVAL, "'%s' has a line that is no \"Name: value\"",
				 path);
	/* An empty value would remove one of libcurl's own headers. */
	if (!colon[1 + strspn(colon + 1, " \t")])
		return error_set(error, -EINVAL, "'%s' has a header without a value", path);
	return login_add_header(login, "%s", line);
}

static int load_headers(const char *path, struct login *login, struct error *error)
{
	_cleanup_(secret_clear) struct secret file = {};
	char *next = NULL;
	int err = secret_read(path, true, &file, error);

	if (err)
		return err;
	for (char *line = strtok_r(file.text, "\n", &next); line && !err;
	     line = strtok_r(NULL, "\n", &next))
		err = add_header_line(login, path, line, error);
	return err;
}

static int load_line(const char *path, char **line, struct error *error)
{
	_cleanup_(secret_clear) struct secret file = {};
	int err = secret_read(path, true, &file, error);

	return err ?: secret_line(path, &file, line, error);
}

static int load_token(const char *path, struct login *login, struct error *error)
{
	char *token = NULL;
	int err = load_line(path, &token, error);

	if (!err)
		err = login_add_header(login, "Authorization: Bearer %s", token);
	secret_free(token);
	return err;
}

static int load_user(const char *path, struct login *login, struct error *error)
{
	char *colon;
	int err = load_line(path, &login->user, error);

	if (err)
		return err;
	colon = strchr(login->user, ':');
	if (!colon)
		return error_set(error, -EINVAL, "'%s' is not \"user:password\"", path);
	login->password = strdup(colon + 1);
	if (!login->password)
		return error_set(error, -ENOMEM, "no memory for '%s'", path);
	explicit_bzero(colon, strlen(colon));
	return 0;
}

static int http_load(struct remote *remote, struct login *login, struct error *error)
{
	const struct http_mirror *http = (const struct http_mirror *)remote;
	int err = 0;

	if (http->url_file)
		err = load_line(http->url_file, &login->url, error);
	if (!err && http->url_file)
		err = url_check(login->url, http->url_file, error);
	if (!err && http->headers_file)
		err = load_headers(http->headers_file, login, error);
	if (!err && http->bearer_token_file)
		err = load_token(http->bearer_token_file, login, error);
	if (!err && http->basic_auth_file)
		err = load_user(http->basic_auth_file, login, error);
	return err;
}

/* The files may have been replaced since. */
static bool http_refused(struct remote *remote, const struct response *response)
{
	return remote->reload_ms && (response->status == 401 || response->status == 403);
}

static void http_prepare(const struct remote *remote, const struct login *login, CURL *easy)
{
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

static int http_parse(struct mirror *mirror, json_t *keys, struct error *error)
{
	struct http_mirror *http = mirror->private;
	int err = remote_parse(&http->remote, &http_remote_ops, keys, error);
	bool secret;

	if (!err)
		err = remote_take_path(keys, "url_file", &http->url_file, error);
	if (!err)
		err = keys_take_string(keys, "url", !http->url_file, &http->url, error);
	if (!err && http->url)
		err = url_check(http->url, "url", error);
	if (!err)
		err = remote_take_path(keys, "headers_file", &http->headers_file, error);
	if (!err)
		err = remote_take_path(keys, "bearer_token_file", &http->bearer_token_file, error);
	if (!err)
		err = remote_take_path(keys, "basic_auth_file", &http->basic_auth_file, error);
	if (err)
		return err;
	if (http->bearer_token_file && http->basic_auth_file)
		return error_set(
			error, -EINVAL,
			"\"bearer_token_file\" and \"basic_auth_file\" exclude each other");
	if (http->url && http->url_file)
		return error_set(error, -EINVAL, "\"url\" and \"url_file\" exclude each other");
	secret = http->headers_file || http->bearer_token_file || http->basic_auth_file ||
		 http->url_file || (http->url && strchr(http->url, '?'));
	if (secret)
		secret_guard_process();
	if (http->url && !http->headers_file && !http->bearer_token_file &&
	    !http->basic_auth_file && !http->remote.ca_file && !http->remote.client_cert &&
	    !url_is_https(http->url))
		http->remote.reload_ms = 0;
	return remote_settle_caches(&http->remote, http->url ?: http->url_file, secret, error);
}

static void http_close(struct mirror *mirror)
{
	struct http_mirror *http = mirror->private;

	remote_close(&http->remote);
	/* Its query may contain a signature. */
	secret_free(http->url);
	free(http->url_file);
	free(http->headers_file);
	free(http->bearer_token_file);
	free(http->basic_auth_file);
}

static char *http_url(const struct mirror *mirror)
{
	const struct http_mirror *http = mirror->private;

	return strdup(http->url ?: "");
}

static const struct object_ops http_object_ops = {
	.url = http_url,
	.identity = object_identity,
	.conditional = true,
};

static const char *http_host(const struct mirror *mirror, char *text, size_t bytes)
{
	const struct http_mirror *http = mirror->private;

	if (http->url)
		return url_host(http->url, text, bytes);
	/* The host is known only after the file was read, and may change with it. */
	snprintf(text, bytes, "%s", http->url_file);
	return text;
}

static const struct mirror_ops http_ops = {
	.name = "http",
	.private_bytes = sizeof(struct http_mirror),
	.parse = http_parse,
	.close = http_close,
	.object = &http_object_ops,
	.host = http_host,
	OBJECT_MIRROR_OPS,
};
MIRROR_KIND(http_ops);
