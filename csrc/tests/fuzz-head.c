/* SPDX-License-Identifier: MIT */
/*
 * fuzz-head: heads of responses as http1_head.h takes them. Without arguments, it takes one from
 * standard input, and prints {"result": ..., ...}.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "fetch/mirror/http1_head.h"
#include "tests/fuzz.h"

enum { INPUT_BYTES_MAX = HTTP1_HEAD_MAX_BYTES + 64, PARTS = 128 };

/* How many lines begin with this, without regard to case. */
static unsigned count_lines(const char *head, size_t length, const char *begin)
{
	size_t bytes = strlen(begin);
	unsigned count = 0;

	for (size_t at = 0; at + bytes <= length; at++)
		count += (!at || head[at - 1] == '\n') && !strncasecmp(head + at, begin, bytes);
	return count;
}

/* What holds for all heads that were taken, said in another way than the parser does. */
static void check_taken(const char *data, size_t length, const struct http1_head *head)
{
	fuzz_require(head->length <= length && head->length <= HTTP1_HEAD_MAX_BYTES, "too long");
	fuzz_require(head->length >= 4 && !memcmp(data + head->length - 4, "\r\n\r\n", 4),
		     "no end");
	fuzz_require(memmem(data, head->length - 1, "\r\n\r\n", 4) == NULL,
		     "an end before its end");
	fuzz_require(head->status >= 200 && head->status < 600, "another status");
	fuzz_require(count_lines(data, head->length, "content-length:") == 1, "no one length");
	fuzz_require(!count_lines(data, head->length, "transfer-encoding:"), "a coding");
	for (size_t at = 0; at < head->length; at++) {
		unsigned char c = (unsigned char)data[at];

		fuzz_require(c >= ' ' || c == '\t' || c == '\r' || c == '\n',
			     "a control character");
		fuzz_require(c != '\n' || data[at - 1] == '\r', "LF alone");
		fuzz_require(c != '\r' || data[at + 1] == '\n', "CR alone");
	}
}

static void try_head(const char *data, size_t length)
{
	/* Just as long, so that the address sanitizer sees what is read behind it. */
	char *copy = malloc(length ?: 1);
	struct http1_head head = {}, part;
	size_t step = 1 + length / PARTS;
	int result;

	if (!copy)
		abort();
	memcpy(copy, data, length);
	result = http1_head_parse(copy, length, &head);
	if (result > 0) {
		check_taken(copy, length, &head);
		/* Parts of it, of each length if it is short: they are no heads, but may become one. */
		for (size_t bytes = head.length; bytes; bytes -= bytes < step ? bytes : step)
			fuzz_require(!http1_head_parse(copy, bytes - 1, &part),
				     "a part is something");
		fuzz_require(http1_head_parse(copy, head.length, &part) == 1 &&
				     part.content_length == head.content_length &&
				     part.status == head.status && part.close == head.close,
			     "what follows a head matters");
	} else if (!result) {
		fuzz_require(length < HTTP1_HEAD_MAX_BYTES, "goes on for ever");
	}
	free(copy);
}

static void run(const uint8_t *data, size_t length)
{
	try_head((const char *)data, length);
}

static const struct fuzzer fuzzer = {
	.name = "fuzz-head",
	.input_bytes = FUZZ_INPUT_BYTES_MAX,
	.run = run,
};

#ifndef FUZZ_LIBFUZZER
static int print_head(void)
{
	static char data[INPUT_BYTES_MAX];
	size_t length = fread(data, 1, sizeof(data), stdin);
	struct http1_head head = {};
	int result = http1_head_parse(data, length, &head);

	try_head(data, length);
	printf("{\"result\": %d, \"status\": %u, \"content_length\": %" PRIu64
	       ", \"length\": %zu, \"close\": %s}\n",
	       result, head.status, head.content_length, head.length,
	       head.close ? "true" : "false");
	return EXIT_SUCCESS;
}

int main(int argc, char **argv)
{
	return argc > 1 ? fuzz_main(&fuzzer, argc, argv) : print_head();
}
#else
FUZZ_PROGRAM(fuzzer)
#endif
