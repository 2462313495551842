/* SPDX-License-Identifier: MIT */
/*
 * Text from elsewhere (a server's header, a path, or a text cut to fit a buffer) may be any bytes.
 * JSON and logs need UTF-8: jansson makes no JSON of anything else.
 */
#pragma once

#include <jansson.h>
#include <stdbool.h>

/* Makes text valid: replaces each byte that belongs to no character with '?'. */
void utf8_repair(char *text);

/* Whether text has no control characters, so that it can be a line of a log or of a header. */
bool text_is_plain(const char *text);
/* Replaces them with '?'. */
void text_make_plain(char *text);

/* Makes a JSON string of any bytes. Returns a new reference, or NULL when memory is short. */
json_t *utf8_json(const char *text);
