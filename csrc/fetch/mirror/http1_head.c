/* SPDX-License-Identifier: MIT */
#include "fetch/mirror/http1_head.h"

#include <errno.h>
#include <string.h>
#include <strings.h>

enum {
	LENGTH_DIGITS_MAX = 18, /* below 2^63 */
	STATUS_LINE_BYTES = 13, /* "HTTP/1.1 206 " */
};

/* A part of a line. */
struct word {
	const char *text;
	size_t length;
};

struct state {
	struct http1_head head;
	bool has_length;
};

static bool is(const struct word *word, const char *text)
{
	return word->length == strlen(text) && !strncasecmp(word->text, text, word->length);
}

static bool is_digit(char c)
{
	return c >= '0' && c <= '9';
}

/* RFC 9110, 5.6.2. NB: not isalnum(), which depends on the locale. */
static bool is_token_character(char c)
{
	return is_digit(c) || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') ||
	       (c && strchr("!#$%&'*+-.^_`|~", c));
}

static bool is_space(char c)
{
	return c == ' ' || c == '\t';
}

/* Whether there are no control characters in it, but tabs. */
static bool is_text(const struct word *word)
{
	for (size_t i = 0; i < word->length; i++) {
		unsigned char c = (unsigned char)word->text[i];

		if ((c < ' ' && c != '\t') || c == 127)
			return false;
	}
	return true;
}

static void trim(struct word *word)
{
	while (word->length && is_space(word->text[0])) {
		word->text++;
		word->length--;
	}
	while (word->length && is_space(word->text[word->length - 1]))
		word->length--;
}

static bool take_status(struct state *state, const struct word *line)
{
	const char *digits = line->text + 9;

	if (line->length < STATUS_LINE_BYTES || memcmp(line->text, "HTTP/1.1 ", 9) != 0 ||
	    line->text[STATUS_LINE_BYTES - 1] != ' ' || !is_text(line) || digits[0] < '2' ||
	    digits[0] > '5' || !is_digit(digits[1]) || !is_digit(digits[2]))
		return false;
	state->head.status =
		(unsigned)((digits[0] - '0') * 100 + (digits[1] - '0') * 10 + (digits[2] - '0'));
	return state->head.status != 204;
}

static bool take_length(struct state *state, const struct word *value)
{
	uint64_t number = 0;

	if (state->has_length || !value->length || value->length > LENGTH_DIGITS_MAX)
		return false;
	for (size_t i = 0; i < value->length; i++) {
		if (!is_digit(value->text[i]))
			return false;
		number = number * 10 + (uint64_t)(value->text[i] - '0');
	}
	state->head.content_length = number;
	state->has_length = true;
	return true;
}

/* A list of words, between commas. An offer to upgrade needs no answer. */
static bool take_connection(struct state *state, const struct word *value)
{
	const char *end = value->text + value->length;
	const char *at = value->text;

	for (;;) {
		const char *comma = memchr(at, ',', (size_t)(end - at));
		struct word word = { at, (size_t)((comma ?: end) - at) };

		trim(&word);
		if (is(&word, "close"))
			state->head.close = true;
		else if (!is(&word, "keep-alive") && !is(&word, "upgrade"))
			return false;
		if (!comma)
			return true;
		at = comma + 1;
	}
}

static bool take_header(struct state *state, const struct word *line)
{
	struct word name = { .text = line->text }, value;

	while (name.length < line->length && is_token_character(name.text[name.length]))
		name.length++;
	if (!name.length || name.length == line->length || name.text[name.length] != ':')
		return false;
	value.text = line->text + name.length + 1;
	value.length = line->length - name.length - 1;
	if (!is_text(&value))
		return false;
	trim(&value);
	if (is(&name, "content-length"))
		return take_length(state, &value);
	if (is(&name, "connection"))
		return take_connection(state, &value);
	return !is(&name, "transfer-encoding");
}

int http1_head_parse(const char *data, size_t length, struct http1_head *head)
{
	size_t most = length < HTTP1_HEAD_MAX_BYTES ? length : HTTP1_HEAD_MAX_BYTES;
	struct state state = {};
	size_t at = 0;

	for (;;) {
		const char *end = memchr(data + at, '\n', most - at);
		struct word line = { .text = data + at };

		if (!end)
			return most == HTTP1_HEAD_MAX_BYTES ? -EPROTO : 0;
		if (end == line.text || end[-1] != '\r')
			return -EPROTO;
		line.length = (size_t)(end - 1 - line.text);
		if (!at) {
			if (!take_status(&state, &line))
				return -EPROTO;
		} else if (!line.length) {
			state.head.length = (size_t)(end + 1 - data);
			*head = state.head;
			return state.has_length ? 1 : -EPROTO;
		} else if (!take_header(&state, &line)) {
			return -EPROTO;
		}
		at = (size_t)(end + 1 - data);
	}
}
