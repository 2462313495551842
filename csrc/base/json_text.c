/* SPDX-License-Identifier: MIT */
#include "base/json_text.h"

#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>

enum { LINE_OF_NONE = -2 };

static _Thread_local uint64_t losses;
/* For a word that jansson has begun to read when memory ends. */
static _Thread_local void *spare;
static _Thread_local size_t spare_bytes;

static void *allocate(size_t bytes)
{
	void *memory = malloc(bytes);

	if (memory)
		return memory;
	losses++;
	if (bytes <= spare_bytes) {
		memory = spare;
		spare = NULL;
		spare_bytes = 0;
	}
	return memory;
}

__attribute__((constructor)) static void count_losses(void)
{
	json_set_alloc_funcs(allocate, free);
}

uint64_t json_text_losses(void)
{
	return losses;
}

struct text {
	const char *at, *end;
	uint64_t losses;
};

/*
 * Gives one byte at a time: after a loss, jansson must read no more. The byte that was lost may end
 * a string, so there is room for that.
 */
static size_t give(void *buffer, size_t room, void *data)
{
	struct text *text = data;

	if (text->at == text->end || losses != text->losses)
		return 0;
	*(char *)buffer = *text->at++;
	return 1;
}

static json_t *no_value(json_error_t *error, const char *why)
{
	if (error) {
		*error = (json_error_t){ .line = LINE_OF_NONE };
		snprintf(error->text, sizeof(error->text), "%s", why);
	}
	return NULL;
}

static json_t *parse(const char *at, size_t length, size_t flags, json_error_t *error)
{
	struct text text = { at, at + length, losses };
	json_t *value;

	/* Words have this room at most: it is doubled when it is too small. */
	spare_bytes = 2 * length + 64;
	spare = malloc(spare_bytes);
	if (!spare)
		losses++;
	value = spare ? json_load_callback(give, &text, flags, error) : NULL;
	free(spare);
	spare = NULL;
	spare_bytes = 0;
	if (losses == text.losses)
		return value;
	json_decref(value);
	return no_value(error, "there is no memory for JSON");
}

static bool is_too_deep(const char *text, size_t length)
{
	unsigned depth = 0;
	bool in_string = false;

	for (size_t i = 0; i < length; i++) {
		char c = text[i];

		if (in_string) {
			i += c == '\\';
			in_string = c != '"';
			continue;
		}
		in_string = c == '"';
		if (c == '[' || c == '{')
			depth++;
		else if ((c == ']' || c == '}') && depth)
			depth--;
		if (depth > JSON_TEXT_DEPTH_MAX)
			return true;
	}
	return false;
}

json_t *json_text_parse(const char *text, size_t length, size_t flags, json_error_t *error)
{
	char why[80];

	if (!is_too_deep(text, length))
		return parse(text, length, flags, error);
	snprintf(why, sizeof(why), "JSON that is nested more than %d deep", JSON_TEXT_DEPTH_MAX);
	return no_value(error, why);
}

const char *json_text_fault(const json_error_t *error)
{
	return error->line == LINE_OF_NONE ? error->text : "not valid JSON";
}

char *json_text_dump(const json_t *json, size_t flags)
{
	uint64_t before = losses;
	char *text = json_dumps(json, flags);

	if (losses == before)
		return text;
	free(text);
	return NULL;
}

int json_text_print(json_t *json)
{
	bool failed = json_dumpf(json, stdout, JSON_COMPACT) || putchar('\n') == EOF;

	json_decref(json);
	if (fflush(stdout) || failed)
		return json ? -EIO : -ENOMEM;
	return 0;
}
