/* SPDX-License-Identifier: MIT */
/*
 * Parses JSON from others, limiting its effect on our stacks; and JSON where memory is short.
 *
 * jansson (2.14 and before) does not notice everywhere that it got no memory. Copies lack keys,
 * text that it makes lacks quotes, and of text that it reads it takes the first part of a number,
 * or reads beyond the end of a string.
 */
#pragma once

#include <jansson.h>
#include <stddef.h>
#include <stdint.h>

/* Descriptions, requests and answers of registries nest at most ten deep. */
enum { JSON_TEXT_DEPTH_MAX = 64 };

/*
 * Parses like json_loadb(), but refuses text that nests deeper than JSON_TEXT_DEPTH_MAX. jansson
 * accepts 2048, and whatever walks through a value (a copy, its release) needs a stack frame for
 * each level, on stacks of 256 KiB. Where memory is short, this is an error.
 */
json_t *json_text_parse(const char *text, size_t length, size_t flags, json_error_t *error);
/* Explains an error of json_text_parse() to the sender of the text. */
const char *json_text_fault(const json_error_t *error);
/* json_dumps(), which returns NULL when memory is short. */
char *json_text_dump(const json_t *json, size_t flags);
/*
 * Prints JSON as a line on standard output, and flushes that. Takes the reference. Returns 0, -EIO, or
 * -ENOMEM if `json` is NULL.
 */
int json_text_print(json_t *json);
/*
 * How often jansson got no memory on this thread. What was made of values meanwhile may lack parts.
 */
uint64_t json_text_losses(void);
