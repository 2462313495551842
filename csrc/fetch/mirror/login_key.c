/* SPDX-License-Identifier: MIT */
#include "fetch/mirror/login_key.h"

#include <fnmatch.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

enum { PART_BYTES = 256 /* more than a part of a host's name has */ };

/* A piece of another text. */
struct text {
	const char *start;
	size_t length;
};

struct key {
	struct text host, path; /* the path without slashes around it */
	bool own;		/* spelled as in the image's name */
	const char *whole;
	const json_t *value;
};

static bool equals(struct text text, const char *other)
{
	return strlen(other) == text.length && !memcmp(text.start, other, text.length);
}

static bool same(struct text one, struct text other)
{
	return one.length == other.length && !memcmp(one.start, other.start, one.length);
}

/* Takes the beginning, up to `end` or all, off `text`, and returns it. */
static struct text cut(struct text *text, char end)
{
	const char *found = memchr(text->start, end, text->length);
	struct text first = { text->start, found ? (size_t)(found - text->start) : text->length };
	size_t taken = first.length + (found != NULL);

	text->start += taken;
	text->length -= taken;
	return first;
}

static struct text strip_slashes(struct text text)
{
	for (; text.length && *text.start == '/'; text.length--)
		text.start++;
	while (text.length && text.start[text.length - 1] == '/')
		text.length--;
	return text;
}

/*
 * The interface's version in a URL is no part of a name. Without a scheme only its last slash tells
 * it from a repository's name.
 */
static struct text strip_version(struct text path, bool is_url)
{
	struct text rest = path, first = cut(&rest, '/');

	if (!equals(first, "v1") && !equals(first, "v2"))
		return path;
	return is_url || (path.length == first.length + 1) ? rest : path;
}

/* The Hub has three names. */
static struct text one_name(struct text host)
{
	if (equals(host, "index.docker.io") || equals(host, "registry-1.docker.io"))
		return (struct text){ "docker.io", strlen("docker.io") };
	return host;
}

static struct key parse_key(const char *whole, const char *registry)
{
	const char *scheme = strstr(whole, "://");
	const char *name = scheme ? scheme + 3 : whole;
	struct text rest = { name, strlen(name) };
	struct key key = { .whole = whole };

	key.host = cut(&rest, '/');
	key.path = strip_slashes(strip_version(rest, scheme != NULL));
	key.own = !scheme && equals(key.host, registry) &&
		  strlen(whole) == key.host.length + !!key.path.length + key.path.length;
	key.host = one_name(key.host);
	return key;
}

static unsigned count(struct text text, char wanted)
{
	unsigned found = 0;

	for (size_t i = 0; i < text.length; i++)
		found += text.start[i] == wanted;
	return found;
}

static bool part_matches(struct text pattern, struct text part)
{
	char wanted[PART_BYTES], given[PART_BYTES];

	if (pattern.length >= sizeof(wanted) || part.length >= sizeof(given))
		return false;
	snprintf(wanted, sizeof(wanted), "%.*s", (int)pattern.length, pattern.start);
	snprintf(given, sizeof(given), "%.*s", (int)part.length, part.start);
	return !fnmatch(wanted, given, FNM_NOESCAPE);
}

/* As the kubelet: a pattern for each part, which has no dots, and the same port. */
static bool host_matches(struct text pattern, struct text host)
{
	struct text wanted, given;

	if (same(pattern, host))
		return true;
	if (pattern.length && *pattern.start == '[') /* an address */
		return false;
	wanted = cut(&pattern, ':');
	given = cut(&host, ':');
	if (!same(pattern, host) || count(wanted, '.') != count(given, '.'))
		return false;
	while (wanted.length || given.length) {
		if (!part_matches(cut(&wanted, '.'), cut(&given, '.')))
			return false;
	}
	return true;
}

static bool path_matches(struct text wanted, struct text path)
{
	if (!wanted.length)
		return true;
	return wanted.length <= path.length && !memcmp(wanted.start, path.start, wanted.length) &&
	       (wanted.length == path.length || path.start[wanted.length] == '/');
}

/* Of two keys that match. The last one decides nothing but is the same at each run. */
static bool is_better(const struct key *key, const struct key *than, struct text host)
{
	bool named = same(key->host, host), than_named = same(than->host, host);

	if (named != than_named)
		return named;
	if (key->path.length != than->path.length)
		return key->path.length > than->path.length;
	if (key->own != than->own)
		return key->own;
	return strcmp(key->whole, than->whole) > 0;
}

const json_t *login_key_find(const json_t *entries, const char *registry, const char *repository)
{
	const struct text host = one_name((struct text){ registry, strlen(registry) });
	const struct text path = { repository, strlen(repository) };
	struct key best = {};
	const char *whole;
	json_t *value;

	json_object_foreach ((json_t *)entries, whole, value) {
		struct key key = parse_key(whole, registry);

		if (!host_matches(key.host, host) || !path_matches(key.path, path))
			continue;
		key.value = value;
		if (!best.value || is_better(&key, &best, host))
			best = key;
	}
	return best.value;
}
