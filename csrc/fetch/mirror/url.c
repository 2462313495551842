/* SPDX-License-Identifier: MIT */
/* Checks URLs, and cuts out the parts that may be shown. */
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>

#include "base/cleanup.h"
#include "fetch/mirror/remote.h"

static void free_url(CURLU **url)
{
	curl_url_cleanup(*url);
}

static void free_part(char **part)
{
	curl_free(*part);
}

#define _cleanup_url_ _cleanup_(free_url)
#define _cleanup_part_ _cleanup_(free_part)

static CURLU *parse(const char *text)
{
	CURLU *url = curl_url();

	if (url &&
	    curl_url_set(url, CURLUPART_URL, text, CURLU_PATH_AS_IS | CURLU_NON_SUPPORT_SCHEME)) {
		curl_url_cleanup(url);
		return NULL;
	}
	return url;
}

static char *part_of(CURLU *url, CURLUPart which)
{
	char *part = NULL;

	return curl_url_get(url, which, &part, CURLU_DEFAULT_PORT) ? NULL : part;
}

static bool has_part(CURLU *url, CURLUPart which)
{
	_cleanup_part_ char *part = part_of(url, which);

	return part != NULL;
}

const char *url_text(const char *url, char text[static REMOTE_TEXT_BYTES])
{
	_cleanup_url_ CURLU *parsed = parse(url);
	_cleanup_part_ char *scheme = NULL, *host = NULL, *port = NULL, *path = NULL;

	if (parsed) {
		scheme = part_of(parsed, CURLUPART_SCHEME);
		host = part_of(parsed, CURLUPART_HOST);
		path = part_of(parsed, CURLUPART_PATH);
		if (curl_url_get(parsed, CURLUPART_PORT, &port, 0))
			port = NULL;
	}
	if (!scheme || !host || !path)
		snprintf(text, REMOTE_TEXT_BYTES, "(no URL)");
	else
		snprintf(text, REMOTE_TEXT_BYTES, "%s://%.100s%s%s%.200s", scheme, host,
			 port ? ":" : "", port ? port : "", path);
	return text;
}

const char *url_host(const char *url, char *text, size_t bytes)
{
	_cleanup_url_ CURLU *parsed = parse(url);
	_cleanup_part_ char *host = parsed ? part_of(parsed, CURLUPART_HOST) : NULL;
	_cleanup_part_ char *port = parsed ? part_of(parsed, CURLUPART_PORT) : NULL;

	snprintf(text, bytes, "%s:%s", host ? host : "?", port ? port : "?");
	return text;
}

bool url_is_https(const char *url)
{
	return !strncasecmp(url, "https:", 6);
}

bool url_same_origin(const char *one, const char *other)
{
	char first[REMOTE_TEXT_BYTES], second[REMOTE_TEXT_BYTES];

	return url_is_https(one) == url_is_https(other) &&
	       !strcasecmp(url_host(one, first, sizeof(first)),
			   url_host(other, second, sizeof(second))) &&
	       first[0] != '?';
}

bool url_is_loopback(const char *url)
{
	_cleanup_url_ CURLU *parsed = parse(url);
	_cleanup_part_ char *host = parsed ? part_of(parsed, CURLUPART_HOST) : NULL;
	unsigned a, b, c, d;
	char rest;

	if (!host)
		return false;
	if (!strcasecmp(host, "localhost") || !strcmp(host, "[::1]"))
		return true;
	/* NB: not "127.example.net". */
	return sscanf(host, "%3u.%3u.%3u.%3u%c", &a, &b, &c, &d, &rest) == 4 && a == 127;
}

int url_check(const char *url, const char *key, struct error *error)
{
	_cleanup_url_ CURLU *parsed = parse(url);
	_cleanup_part_ char *scheme = parsed ? part_of(parsed, CURLUPART_SCHEME) : NULL;
	char text[REMOTE_TEXT_BYTES];
	const char *rest;

	/* NB: libcurl would guess a scheme, and accept a missing slash. */
	rest = strstr(url, "://");
	if (rest && rest > url && !parsed) {
		error_set_hint(error, "like https://host/path, or https://host:8080/path; "
				      "ports go up to 65535");
		return error_set(error, -EINVAL, "\"%s\" is no valid URL", key);
	}
	if (!scheme || !rest) {
		error_set_hint(error, "like https://host/path");
		return error_set(error, -EINVAL, "\"%s\" is no URL with a scheme", key);
	}
	url_text(url, text);
	if (strcasecmp(scheme, "http") != 0 && strcasecmp(scheme, "https") != 0)
		return error_set(error, -EINVAL,
				 "\"%s\" is %.20s:...: the scheme must be http or https", key,
				 scheme);
	if (rest[3] == '/' || !has_part(parsed, CURLUPART_HOST))
		return error_set(error, -EINVAL, "\"%s\" has no host", key);
	if (has_part(parsed, CURLUPART_USER) || has_part(parsed, CURLUPART_PASSWORD)) {
		error_set_text(error, "\"%s\" (%s) has a user or a password in it", key, text);
		/*
		 * No key names a file for the proxy, so libcurl may get a login from the
		 * environment only.
		 */
		error_set_hint(
			error, "%s",
			!strcmp(key, "proxy") ?
				"leave \"proxy\" out, and give it in the environment of the "
				"server: http_proxy, https_proxy" :
			!strcmp(key, "url") ?
				"name a file, mode 600, as \"basic_auth_file\": its first line is "
				"user:password" :
			!strcmp(key, "registry") ?
				"a file with the login is named by \"docker_config\"" :
				"name a file of keys as \"credentials_file\"");
		return -EINVAL;
	}
	if (has_part(parsed, CURLUPART_FRAGMENT))
		return error_set(error, -EINVAL, "\"%s\" (%s) has a fragment ('#')", key, text);
	return 0;
}
