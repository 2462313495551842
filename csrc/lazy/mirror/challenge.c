/* SPDX-License-Identifier: MIT */
#include "lazy/mirror/challenge.h"

#include <curl/curl.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "base/cleanup.h"
#include "lazy/mirror/secret.h"

static void free_escaped(char **text)
{
	curl_free(*text);
}

#define _cleanup_escaped_ _cleanup_(free_escaped)

static const char *skip(const char *text, const char *what)
{
	return text + strspn(text, what);
}

/*
 * Parses a token, or a quoted string with backslashes (RFC 9110, 5.6). Returns what follows it, or
 * NULL.
 */
static const char *parse_value(const char *text, char **value)
{
	bool quoted = *text == '"';
	size_t length = 0;
	char *made = malloc(strlen(text) + 1);

	if (!made)
		return NULL;
	for (text += quoted; *text; text++) {
		if (quoted ? *text == '"' : strchr(", \t", *text) != NULL)
			break;
		if (quoted && *text == '\\' && text[1])
			text++;
		made[length++] = *text;
	}
	made[length] = 0;
	if (quoted && *text != '"') {
		free(made);
		return NULL;
	}
	*value = made;
	return text + quoted;
}

/* Takes `value`. The first of several counts. */
static void put(char **place, char *value)
{
	if (*place)
		free(value);
	else
		*place = value;
}

static void take(struct challenge *challenge, const char *name, size_t length, char *value)
{
	if (length == 5 && !strncasecmp(name, "realm", length))
		put(&challenge->realm, value);
	else if (length == 7 && !strncasecmp(name, "service", length))
		put(&challenge->service, value);
	else if (length == 5 && !strncasecmp(name, "scope", length))
		put(&challenge->scope, value);
	else
		free(value);
}

int challenge_parse(const char *text, struct challenge *challenge)
{
	const char *next = skip(text, " \t,");

	while (next && *next) {
		const char *name = next;
		size_t length = strcspn(name, "= \t,");
		char *value = NULL;

		if (name[length] != '=')
			break; /* the next challenge on the same line */
		next = parse_value(name + length + 1, &value);
		if (!next)
			break;
		take(challenge, name, length, value);
		next = skip(next, " \t,");
	}
	if (next && challenge->realm)
		return 0;
	challenge_clear(challenge);
	return -EPROTO;
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
