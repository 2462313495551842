/* SPDX-License-Identifier: MIT */
#include "fetch/mirror/challenge.h"

#include <ctype.h>
#include <curl/curl.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "base/cleanup.h"
#include "fetch/mirror/secret.h"

static void free_escaped(char **text)
{
	curl_free(*text);
}

#define _cleanup_escaped_ _cleanup_(free_escaped)

static const char *skip(const char *text, const char *what)
{
	return text + strspn(text, what);
}

/* Returns what follows the value, or NULL where a quoted string has no end. */
static const char *end_of_value(const char *text)
{
	if (*text != '"')
		return text + strcspn(text, " \t,");
	for (text++; *text && *text != '"'; text++)
		text += *text == '\\' && text[1];
	return *text ? text + 1 : NULL;
}

/* Copies a token, or a quoted string with backslashes (RFC 9110, 5.6), from there to `end`. */
static char *copy_value(const char *text, const char *end)
{
	bool quoted = *text == '"';
	char *made = malloc((size_t)(end - text) + 1), *to = made;

	if (!made)
		return NULL;
	text += quoted;
	for (end -= quoted; text < end; text++) {
		if (quoted && *text == '\\')
			text++;
		*to++ = *text;
	}
	*to = 0;
	return made;
}

static bool is_name(const char *name, size_t length, const char *wanted)
{
	return length == strlen(wanted) && !strncasecmp(name, wanted, length);
}

/* Takes a parameter of bearer. The first of several counts. */
static int take(struct challenge *challenge, const char *name, size_t length, const char *value,
		const char *end)
{
	char **place = is_name(name, length, "realm")	? &challenge->realm :
		       is_name(name, length, "service") ? &challenge->service :
		       is_name(name, length, "scope")	? &challenge->scope :
							  NULL;

	if (!place || *place)
		return 0;
	*place = copy_value(value, end);
	return *place ? 0 : -ENOMEM;
}

/* Begins a challenge. Returns whether its parameters count: of bearer, until there is a realm. */
static bool begin(struct challenge *challenge, const char *name, size_t length)
{
	if (is_name(name, length, "basic"))
		challenge->basic = true;
	if (!is_name(name, length, "bearer") || challenge->realm)
		return false;
	free(challenge->service);
	free(challenge->scope);
	challenge->service = challenge->scope = NULL;
	challenge->bearer = true;
	return true;
}

static int parse_all(const char *text, struct challenge *challenge)
{
	bool counts = false;
	int err = 0;

	for (text = skip(text, " \t,"); !err && *text; text = skip(text, " \t,")) {
		const char *name = text, *value, *end;
		size_t length = strcspn(name, "= \t,");

		value = skip(name + length, " \t");
		if (*value != '=') {
			counts = begin(challenge, name, length);
			text = name + length;
			continue;
		}
		value = skip(value + 1, " \t");
		end = end_of_value(value);
		if (!end)
			break;
		if (counts)
			err = take(challenge, name, length, value, end);
		text = end;
	}
	return err;
}

static bool has_scheme(const char *url)
{
	size_t length = 0;

	while (isalnum((unsigned char)url[length]) || (url[length] && strchr("+.-", url[length])))
		length++;
	return length && url[length] == ':';
}

/* Makes a realm that is relative a URL, or empty. */
static int resolve(struct challenge *challenge, const char *base)
{
	CURLU *url;
	char *text = NULL;

	if (!challenge->realm || has_scheme(challenge->realm))
		return 0;
	url = curl_url();
	if (!url)
		return -ENOMEM;
	if (!curl_url_set(url, CURLUPART_URL, base, 0) &&
	    !curl_url_set(url, CURLUPART_URL, challenge->realm, 0))
		curl_url_get(url, CURLUPART_URL, &text, 0);
	curl_url_cleanup(url);
	free(challenge->realm);
	challenge->realm = strdup(text ?: "");
	curl_free(text);
	return challenge->realm ? 0 : -ENOMEM;
}

int challenge_parse(const char *text, const char *base, struct challenge *challenge)
{
	int err;

	*challenge = (struct challenge){};
	err = parse_all(text, challenge);
	if (!err)
		err = resolve(challenge, base);
	if (err)
		challenge_clear(challenge);
	return err;
}

bool challenge_wants_token(const struct challenge *challenge)
{
	return challenge->realm || (challenge->bearer && !challenge->basic);
}

void challenge_clear(struct challenge *challenge)
{
	free(challenge->realm);
	free(challenge->service);
	free(challenge->scope);
	*challenge = (struct challenge){};
}

static char *escape(const char *text)
{
	/* NB: a length of 0 means strlen(). */
	return curl_easy_escape(NULL, text, 0);
}

static int make_form(const char *service, const char *scope, const char *identity_token,
		     char **form)
{
	char *token = escape(identity_token);
	int length = -1;

	if (token)
		length = asprintf(form,
				  "grant_type=refresh_token&client_id=btrfs-ublk&service=%s&"
				  "scope=%s&refresh_token=%s",
				  service, scope, token);
	if (token)
		explicit_bzero(token, strlen(token));
	curl_free(token);
	return length < 0 ? -ENOMEM : 0;
}

int challenge_request(const struct challenge *challenge, const char *repository,
		      const char *identity_token, char **url, char **form)
{
	_cleanup_escaped_ char *service = escape(challenge->service ? challenge->service : "");
	_cleanup_escaped_ char *scope = NULL;
	_cleanup_free_ char *usual = NULL;

	if (asprintf(&usual, "repository:%s:pull", repository) < 0) {
		usual = NULL;
		return -ENOMEM;
	}
	scope = escape(challenge->scope ? challenge->scope : usual);
	if (!service || !scope)
		return -ENOMEM;
	*form = NULL;
	if (identity_token) {
		*url = strdup(challenge->realm);
		if (*url && !make_form(service, scope, identity_token, form))
			return 0;
		free(*url);
		*url = NULL;
		return -ENOMEM;
	}
	if (asprintf(url, "%s%cservice=%s&scope=%s", challenge->realm,
		     strchr(challenge->realm, '?') ? '&' : '?', service, scope) < 0) {
		*url = NULL;
		return -ENOMEM;
	}
	return 0;
}
