/* SPDX-License-Identifier: MIT */
#include "base/json_text.h"

#include <stdbool.h>
#include <stdio.h>

enum { LINE_OF_NONE = -2 };

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
	if (!is_too_deep(text, length))
		return json_loadb(text, length, flags, error);
	if (error) {
		*error = (json_error_t){ .line = LINE_OF_NONE };
		snprintf(error->text, sizeof(error->text), "JSON that is nested more than %d deep",
			 JSON_TEXT_DEPTH_MAX);
	}
	return NULL;
}

const char *json_text_fault(const json_error_t *error)
{
	return error->line == LINE_OF_NONE ? error->text : "not valid JSON";
}
