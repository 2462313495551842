/* SPDX-License-Identifier: MIT */
/*
 * An object of an S3 store: `"bucket"`, `"key"`, `"region"` (default us-east-1), `"endpoint"` (a
 * URL without a path; else Amazon's of that region), `"path_style"` (ENDPOINT/BUCKET/KEY; the
 * default where there is an endpoint), `"version_id"`, and `"credentials_file"` with `"profile"`,
 * or `"anonymous"`. remote.h has certificates and proxy.
 *
 * libcurl signs the requests (AWS Signature Version 4). The object's identity is its ETag, which is
 * checked in each response. It is no condition of the request, since not all stores support
 * If-Range.
 */
#include <ctype.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/cleanup.h"
#include "base/keys.h"
#include "fetch/mirror/awsconfig.h"
#include "fetch/mirror/exchange.h"
#include "fetch/mirror/object.h"

enum {
	KEY_MAX_BYTES = 1024,
	CODE_BYTES = 64, /* with its NUL, as below */
	MESSAGE_BYTES = 256,
};

/* The SHA-256 of no bytes, which is what each request sends. */
static const char content_digest[] =
	"x-amz-content-sha256: e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";

struct s3_mirror {
	struct remote remote;
	char *bucket, *key, *region, *endpoint, *version_id, *credentials_file, *profile;
	bool path_style, anonymous;
	char *url;
	char *signature; /* for libcurl: provider, region, service */
};

static int s3_load(struct remote *remote, struct login *login, struct error *error)
{
	const struct s3_mirror *s3 = (const struct s3_mirror *)remote;
	int err;

	if (s3->anonymous)
		return 0;
	/* NB: Amazon demands it. libcurl signs it, but not all versions add it by themselves. */
	err = login_add_header(login, "%s", content_digest);
	return err ?: aws_login_read(s3->credentials_file, s3->profile, login, error);
}

/* Amazon answers 400 when a session has expired. */
static bool s3_refused(struct remote *remote, const struct response *response)
{
	const struct s3_mirror *s3 = (const struct s3_mirror *)remote;

	return !s3->anonymous &&
	       (response->status == 400 || response->status == 401 || response->status == 403);
}

static void s3_prepare(const struct remote *remote, const struct login *login, CURL *easy)
{
	const struct s3_mirror *s3 = (const struct s3_mirror *)remote;

	if (!login->user)
		return;
	curl_easy_setopt(easy, CURLOPT_AWS_SIGV4, s3->signature);
	curl_easy_setopt(easy, CURLOPT_USERNAME, login->user);
	curl_easy_setopt(easy, CURLOPT_PASSWORD, login->password);
}

/* Copies an element's text. Leaves it empty if it is not there, is too long, or is no text. */
static void take_element(const char *body, const char *name, char *text, size_t bytes)
{
	static const char *const entities[] = { "&lt;<", "&gt;>", "&quot;\"", "&apos;'", "&amp;&" };
	const char *at = strstr(body, name), *end = at ? strstr(at, "</") : NULL;
	char *to = text;

	*text = 0;
	if (!end)
		return;
	for (at += strlen(name); at < end; at++) {
		unsigned char c = (unsigned char)*at;

		if (to + 1 == text + bytes || (c < ' ' && !isspace(c)) || c == 127) {
			*text = 0;
			return;
		}
		*to = isspace(c) ? ' ' : (char)c;
		for (size_t i = 0; i < sizeof(entities) / sizeof(*entities); i++) {
			size_t length = strlen(entities[i]) - 1;

			if (strncmp(at, entities[i], length) != 0)
				continue;
			*to = entities[i][length];
			at += length - 1;
			break;
		}
		to++;
	}
	while (to > text && to[-1] == ' ')
		to--;
	*to = 0;
}

/* <Error><Code>AccessDenied</Code><Message>...</Message> */
static void s3_explain(const char *body, struct error *error)
{
	char code[CODE_BYTES], message[MESSAGE_BYTES];

	take_element(body, "<Code>", code, sizeof(code));
	take_element(body, "<Message>", message, sizeof(message));
	error_set_text(error, "%s%s%s", code, *code && *message ? ": " : "", message);
}

static const struct remote_ops s3_remote_ops = {
	.load = s3_load,
	.refused = s3_refused,
	.explain = s3_explain,
	.prepare = s3_prepare,
};

/* Escapes all but unreserved characters (RFC 3986, 2.3), as the signature requires. */
static void escape(const char *text, bool slashes, char *escaped)
{
	for (; *text; text++) {
		unsigned char c = (unsigned char)*text;

		if ((c < 0x80 && isalnum(c)) || strchr("-._~", c) || (slashes && c == '/'))
			*escaped++ = (char)c;
		else
			escaped += sprintf(escaped, "%%%02X", c);
	}
	*escaped = 0;
}

static int check_names(const struct s3_mirror *s3, struct error *error)
{
	static const char letters[] = "abcdefghijklmnopqrstuvwxyz0123456789.-";
	size_t length = strlen(s3->bucket);

	if (strspn(s3->bucket, letters) != length || length < 3 || length > 63 ||
	    strstr(s3->bucket, "..") || strchr(".-", s3->bucket[0]))
		return error_set(error, -EINVAL, "\"bucket\" is '%s', which is no valid name",
				 s3->bucket);
	if (strlen(s3->key) > KEY_MAX_BYTES)
		return error_set(error, -EINVAL, "\"key\" has %zu bytes; the limit is %d",
				 strlen(s3->key), KEY_MAX_BYTES);
	if (strspn(s3->region, letters) != strlen(s3->region))
		return error_set(error, -EINVAL, "\"region\" is '%s', which is no valid name",
				 s3->region);
	if (s3->anonymous && (s3->credentials_file || s3->profile))
		return error_set(error, -EINVAL, "\"anonymous\" and \"%s\" exclude each other",
				 s3->credentials_file ? "credentials_file" : "profile");
	return 0;
}

static int take_endpoint(struct s3_mirror *s3, struct error *error)
{
	char *host, *slash;
	int err;

	if (!s3->endpoint &&
	    asprintf(&s3->endpoint, "https://s3.%s.amazonaws.com", s3->region) < 0) {
		s3->endpoint = NULL;
		return error_set(error, -ENOMEM, "no memory for a URL");
	}
	err = url_check(s3->endpoint, "endpoint", error);
	if (err)
		return err;
	host = strstr(s3->endpoint, "://") + 3;
	slash = strpbrk(host, "/?");
	if (slash && strcmp(slash, "/") != 0)
		return error_set(error, -EINVAL, "\"endpoint\" has more than scheme and host: '%s'",
				 s3->endpoint);
	if (slash)
		*slash = 0;
	return 0;
}

static int make_url(struct s3_mirror *s3, struct error *error)
{
	_cleanup_free_ char *key = malloc(3 * strlen(s3->key) + 1);
	_cleanup_free_ char *version = malloc(s3->version_id ? 3 * strlen(s3->version_id) + 1 : 1);
	const char *host = strstr(s3->endpoint, "://") + 3;
	const char *query = s3->version_id ? "?versionId=" : "";
	int scheme = (int)(host - s3->endpoint);
	int length;

	if (!key || !version)
		return error_set(error, -ENOMEM, "no memory for a URL");
	escape(s3->key, true, key);
	escape(s3->version_id ? s3->version_id : "", false, version);
	if (s3->path_style)
		length = asprintf(&s3->url, "%s/%s/%s%s%s", s3->endpoint, s3->bucket, key, query,
				  version);
	else
		length = asprintf(&s3->url, "%.*s%s.%s/%s%s%s", scheme, s3->endpoint, s3->bucket,
				  host, key, query, version);
	if (length < 0)
		s3->url = NULL;
	if (asprintf(&s3->signature, "aws:amz:%s:s3", s3->region) < 0)
		s3->signature = NULL;
	if (!s3->url || !s3->signature)
		return error_set(error, -ENOMEM, "no memory for a URL");
	return url_check(s3->url, "endpoint", error);
}

static int take_keys(struct s3_mirror *s3, json_t *keys, struct error *error)
{
	int err = keys_take_string(keys, "bucket", true, &s3->bucket, error);

	if (!err)
		err = keys_take_string(keys, "key", true, &s3->key, error);
	if (!err)
		err = keys_take_string(keys, "region", false, &s3->region, error);
	if (!err)
		err = keys_take_string(keys, "endpoint", false, &s3->endpoint, error);
	s3->path_style = s3->endpoint != NULL;
	if (!err)
		err = keys_take_bool(keys, "path_style", &s3->path_style, error);
	if (!err)
		err = keys_take_string(keys, "version_id", false, &s3->version_id, error);
	if (!err)
		err = remote_take_path(keys, "credentials_file", &s3->credentials_file, error);
	if (!err)
		err = keys_take_string(keys, "profile", false, &s3->profile, error);
	if (!err)
		err = keys_take_bool(keys, "anonymous", &s3->anonymous, error);
	return err;
}

static int s3_parse(struct mirror *mirror, json_t *keys, struct error *error)
{
	struct s3_mirror *s3 = mirror->private;
	int err = remote_parse(&s3->remote, &s3_remote_ops, keys, error);

	if (!err)
		err = take_keys(s3, keys, error);
	if (!err && !s3->region) {
		s3->region = strdup("us-east-1");
		err = s3->region ? 0 : error_set(error, -ENOMEM, "no memory for a region");
	}
	if (!err)
		err = check_names(s3, error);
	if (!err)
		err = take_endpoint(s3, error);
	if (!err)
		err = make_url(s3, error);
	if (!err && !s3->anonymous)
		secret_guard_process();
	if (!err)
		err = remote_settle_caches(&s3->remote, s3->url, !s3->anonymous, error);
	return err;
}

static void s3_close(struct mirror *mirror)
{
	struct s3_mirror *s3 = mirror->private;

	remote_close(&s3->remote);
	free(s3->bucket);
	free(s3->key);
	free(s3->region);
	free(s3->endpoint);
	free(s3->version_id);
	free(s3->credentials_file);
	free(s3->profile);
	free(s3->url);
	free(s3->signature);
}

static char *s3_url(const struct mirror *mirror)
{
	const struct s3_mirror *s3 = mirror->private;

	return strdup(s3->url);
}

static const struct object_ops s3_object_ops = {
	.url = s3_url,
	.identity = object_identity,
};

static const char *s3_host(const struct mirror *mirror, char *text, size_t bytes)
{
	const struct s3_mirror *s3 = mirror->private;

	return url_host(s3->url, text, bytes);
}

static const struct mirror_ops s3_ops = {
	.name = "s3",
	.private_bytes = sizeof(struct s3_mirror),
	.parse = s3_parse,
	.close = s3_close,
	.object = &s3_object_ops,
	.host = s3_host,
	OBJECT_MIRROR_OPS,
};
MIRROR_KIND(s3_ops);
