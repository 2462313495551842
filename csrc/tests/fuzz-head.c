/* SPDX-License-Identifier: MIT */
/*
 * fuzz-head: heads of responses as http1_head.h takes them.
 *
 *   fuzz-head < HEAD                                 prints {"result": ..., ...}
 *   fuzz-head --iterations N [--seed N]              heads that are changed at random
 *
 * By hand, with clang's libFuzzer:
 *
 *   clang -g -fsanitize=fuzzer,address,undefined -DFUZZ_LIBFUZZER -D_GNU_SOURCE -Icsrc \
 *       csrc/tests/fuzz-head.c csrc/lazy/mirror/http1_head.c -o fuzz-head
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "lazy/mirror/http1_head.h"

enum { INPUT_BYTES_MAX = HTTP1_HEAD_MAX_BYTES + 64, PARTS = 128 };

static void check(bool holds, const char *what)
{
	if (holds)
		return;
	fprintf(stderr, "fuzz-head: %s\n", what);
	abort();
}

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
	check(head->length <= length && head->length <= HTTP1_HEAD_MAX_BYTES, "too long");
	check(head->length >= 4 && !memcmp(data + head->length - 4, "\r\n\r\n", 4), "no end");
	check(memmem(data, head->length - 1, "\r\n\r\n", 4) == NULL, "an end before its end");
	check(head->status >= 200 && head->status < 600, "another status");
	check(count_lines(data, head->length, "content-length:") == 1, "no one length");
	check(!count_lines(data, head->length, "transfer-encoding:"), "a coding");
	for (size_t at = 0; at < head->length; at++) {
		unsigned char c = (unsigned char)data[at];

		check(c >= ' ' || c == '\t' || c == '\r' || c == '\n', "a control character");
		check(c != '\n' || data[at - 1] == '\r', "LF alone");
		check(c != '\r' || data[at + 1] == '\n', "CR alone");
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
			check(!http1_head_parse(copy, bytes - 1, &part), "a part is something");
		check(http1_head_parse(copy, head.length, &part) == 1 &&
			      part.content_length == head.content_length &&
			      part.status == head.status && part.close == head.close,
		      "what follows a head matters");
	} else if (!result) {
		check(length < HTTP1_HEAD_MAX_BYTES, "goes on for ever");
	}
	free(copy);
}

#ifdef FUZZ_LIBFUZZER
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t length);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t length)
{
	try_head((const char *)data, length < INPUT_BYTES_MAX ? length : INPUT_BYTES_MAX);
	return 0;
}
#else
/* splitmix64: small, and the same on every machine. */
static uint64_t random_next(uint64_t *state)
{
	uint64_t value = *state += 0x9E3779B97F4A7C15ull;

	value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9ull;
	value = (value ^ value >> 27) * 0x94D049BB133111EBull;
	return value ^ value >> 31;
}

static const char *const pieces[] = {
	"HTTP/1.1 206 Partial Content\r\n",
	"HTTP/1.1 404 \r\n",
	"HTTP/1.1 100 Continue\r\n\r\n",
	"HTTP/1.0 206 P\r\n",
	"Content-Length: 4096\r\n",
	"content-length:0\r\n",
	"Content-Length: 18446744073709551617\r\n",
	"Content-Length : 5\r\n",
	"Content-Length: 5, 5\r\n",
	"Content-Range: bytes 0-4095/1048576\r\n",
	"ETag: \"abc\"\r\n",
	"Connection: close\r\n",
	"Connection: Keep-Alive, Upgrade\r\n",
	"Transfer-Encoding: chunked\r\n",
	"X:\r\n",
	" folded\r\n",
	"\r\n",
	"\n",
	"\r",
	":",
};

enum { PIECES = sizeof(pieces) / sizeof(*pieces) };

/* Puts a head together, mostly in order, and then perhaps changes some of its bytes. */
static size_t make_head(uint64_t *state, char *data)
{
	unsigned count = (unsigned)(random_next(state) % 9);
	size_t length = 0;

	if (random_next(state) % 64 == 0)
		count *= 60;
	for (unsigned i = 0; i < count; i++) {
		const char *piece = i ? pieces[random_next(state) % PIECES] : pieces[0];
		size_t bytes = strlen(piece);

		if (length + bytes + 4 > INPUT_BYTES_MAX)
			break;
		memcpy(data + length, piece, bytes);
		length += bytes;
	}
	memcpy(data + length, "\r\n\r\n", 4);
	length += 2 * (random_next(state) % 3);
	for (unsigned i = (unsigned)(random_next(state) % 4); i && length; i--)
		data[random_next(state) % length] = (char)random_next(state);
	return length;
}

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
	static char data[INPUT_BYTES_MAX];
	uint64_t seed = 1, iterations = 0;

	for (int i = 1; i + 1 < argc; i += 2) {
		if (!strcmp(argv[i], "--seed"))
			seed = strtoull(argv[i + 1], NULL, 10);
		else if (!strcmp(argv[i], "--iterations"))
			iterations = strtoull(argv[i + 1], NULL, 10);
	}
	if (!iterations)
		return print_head();
	for (uint64_t i = 0; i < iterations; i++) {
		uint64_t state = seed + i;

		try_head(data, make_head(&state, data));
	}
	return EXIT_SUCCESS;
}
#endif
