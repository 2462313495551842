/* SPDX-License-Identifier: MIT */
#include "base/utf8.h"

#include <stdint.h>
#include <string.h>

#include "base/cleanup.h"

/*
 * Returns the length of the character that begins there (RFC 3629, table 3-7 of Unicode), or 0 when
 * none does.
 */
static size_t character_bytes(const uint8_t *at)
{
	uint8_t least = 0x80, most = 0xbf;
	size_t bytes;

	if (at[0] < 0x80)
		return 1;
	if (at[0] < 0xc2 || at[0] > 0xf4)
		return 0;
	bytes = at[0] < 0xe0 ? 2 : at[0] < 0xf0 ? 3 : 4;
	/* No longer than needed, no surrogates, nothing beyond U+10FFFF. */
	if (at[0] == 0xe0)
		least = 0xa0;
	else if (at[0] == 0xed)
		most = 0x9f;
	else if (at[0] == 0xf0)
		least = 0x90;
	else if (at[0] == 0xf4)
		most = 0x8f;
	if (at[1] < least || at[1] > most)
		return 0;
	for (size_t i = 2; i < bytes; i++) {
		if (at[i] < 0x80 || at[i] > 0xbf)
			return 0;
	}
	return bytes;
}

void utf8_repair(char *text)
{
	uint8_t *at = (uint8_t *)text;

	while (*at) {
		size_t bytes = character_bytes(at);

		if (!bytes)
			*at = '?';
		at += bytes ?: 1;
	}
}

static bool is_control(char c)
{
	return (unsigned char)c < ' ' || c == 127;
}

bool text_is_plain(const char *text)
{
	while (*text && !is_control(*text))
		text++;
	return !*text;
}

void text_make_plain(char *text)
{
	for (; *text; text++) {
		if (is_control(*text))
			*text = '?';
	}
}

json_t *utf8_json(const char *text)
{
	_cleanup_free_ char *copy = NULL;
	json_t *json = json_string(text);

	if (json)
		return json;
	copy = strdup(text);
	if (!copy)
		return NULL;
	utf8_repair(copy);
	return json_string(copy);
}
