/* SPDX-License-Identifier: MIT */
/* Parses JSON from others, limiting its effect on our stacks. */
#ifndef BASE_JSON_TEXT_H
#define BASE_JSON_TEXT_H

#include <jansson.h>
#include <stddef.h>

/* Descriptions, requests and answers of registries nest at most ten deep. */
enum { JSON_TEXT_DEPTH_MAX = 64 };

/*
 * Parses like json_loadb(), but refuses text that nests deeper than JSON_TEXT_DEPTH_MAX. jansson
 * accepts 2048, and whatever walks through a value (a copy, its release) needs a stack frame for
 * each level, on stacks of 256 KiB.
 */
json_t *json_text_parse(const char *text, size_t length, size_t flags, json_error_t *error);
/* Explains an error of json_text_parse() to whoever has sent the text. */
const char *json_text_fault(const json_error_t *error);

#endif
