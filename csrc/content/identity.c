/* SPDX-License-Identifier: MIT */
#include "content/identity.h"

#include <stdio.h>
#include <string.h>

#include "base/utf8.h"

static const char of_etag[] = "etag ", of_date[] = "modified ";

struct parts {
	const char *etag; /* its opaque part, with its quotes */
	size_t etag_bytes;
	bool weak;
	const char *date; /* up to the end */
};

static bool begins_with(const char *text, const char *begin)
{
	return !strncmp(text, begin, strlen(begin));
}

/* Returns the last " modified DATE", or NULL. */
static const char *find_date(const char *text)
{
	const char *found = NULL, *next = text;

	while ((next = strstr(next + 1, of_date))) {
		if (next[-1] == ' ')
			found = next;
	}
	return found;
}

/* Returns false if it is not of an object behind HTTP. */
static bool split(const char *text, struct parts *parts)
{
	*parts = (struct parts){};
	if (begins_with(text, of_date)) {
		parts->date = text + strlen(of_date);
		return true;
	}
	if (!begins_with(text, of_etag))
		return false;
	text += strlen(of_etag);
	parts->date = *text ? find_date(text) : NULL;
	parts->etag_bytes = parts->date ? (size_t)(parts->date - 1 - text) : strlen(text);
	if (parts->date)
		parts->date += strlen(of_date);
	parts->weak = begins_with(text, "W/\"");
	parts->etag = text + (parts->weak ? 2 : 0);
	parts->etag_bytes -= parts->weak ? 2 : 0;
	return true;
}

/* Whether it is a valid one (RFC 9110, 8.8.3), but for the W/ of a weak one. */
static bool is_valid(const struct parts *parts)
{
	const char *etag = parts->etag;

	if (parts->etag_bytes < 2 || etag[0] != '"' || etag[parts->etag_bytes - 1] != '"')
		return false;
	for (size_t i = 1; i < parts->etag_bytes - 1; i++) {
		if ((unsigned char)etag[i] <= ' ' || etag[i] == '"' || etag[i] == 127)
			return false;
	}
	return true;
}

bool identity_is_valid(const char *text)
{
	struct parts parts;

	return strlen(text) < IDENTITY_BYTES && text_is_plain(text) && split(text, &parts);
}

bool identity_is_same(const char *one, const char *other)
{
	struct parts a, b;
	bool same_date;

	if (!strcmp(one, other))
		return true;
	if (!split(one, &a) || !split(other, &b))
		return false;
	same_date = a.date && b.date && !strcmp(a.date, b.date);
	if (!a.etag || !b.etag)
		return same_date;
	if (a.etag_bytes != b.etag_bytes || memcmp(a.etag, b.etag, a.etag_bytes) != 0)
		return false;
	if (a.weak != b.weak)
		return same_date;
	return same_date || !a.date || !b.date || (!a.weak && is_valid(&a));
}

enum condition identity_condition(const char *identity, char text[static IDENTITY_BYTES])
{
	struct parts parts;

	if (!split(identity, &parts))
		return CONDITION_NONE;
	if (!parts.etag) {
		snprintf(text, IDENTITY_BYTES, "%s", parts.date);
		return CONDITION_DATE;
	}
	if (parts.weak || !is_valid(&parts))
		return CONDITION_NONE;
	snprintf(text, IDENTITY_BYTES, "%.*s", (int)parts.etag_bytes, parts.etag);
	return CONDITION_ETAG;
}
