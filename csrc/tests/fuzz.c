/* SPDX-License-Identifier: MIT */
#include "tests/fuzz.h"

#include <inttypes.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/message.h"

enum { ITERATION_SECONDS_MAX = 20 };

int fuzz_one(const struct fuzzer *fuzzer, const uint8_t *data, size_t length)
{
	static bool has_begun;

	if (!has_begun)
		fuzzer->begin(getenv("FUZZ_PATH"));
	has_begun = true;
	fuzzer->run(data, length < fuzzer->input_bytes ? length : fuzzer->input_bytes);
	return 0;
}

/* splitmix64: small, and the same on every machine. */
static uint64_t random_next(uint64_t *state)
{
	uint64_t value = *state += 0x9E3779B97F4A7C15ull;

	value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9ull;
	value = (value ^ value >> 27) * 0x94D049BB133111EBull;
	return value ^ value >> 31;
}

/* The message is formatted in advance, as the signal handler may not do that. */
static char hang_text[96];
static size_t hang_text_length;

static void hung(int signal_number)
{
	(void)signal_number;
	(void)!write(STDERR_FILENO, hang_text, hang_text_length);
	_exit(EXIT_FAILED);
}

static void fuzz(const struct fuzzer *fuzzer, const char *path, uint64_t seed, uint64_t iterations)
{
	uint8_t data[FUZZ_INPUT_BYTES_MAX];

	fuzzer->begin(path);
	for (uint64_t i = 0; i < iterations; i++) {
		uint64_t state = seed + i;
		size_t length = 6 + random_next(&state) % (fuzzer->input_bytes - 6);

		/* Mostly make few changes: with many, already the first checks fail. */
		if (random_next(&state) % 4)
			length = 6 + length % 14;
		for (size_t b = 0; b < length; b++)
			data[b] = (uint8_t)random_next(&state);
		hang_text_length = (size_t)snprintf(hang_text, sizeof(hang_text),
						    "%s: --seed %" PRIu64 " --iterations 1 hangs\n",
						    fuzzer->name, seed + i);
		alarm(ITERATION_SECONDS_MAX);
		fuzzer->run(data, length);
	}
	alarm(0);
	fuzzer->end();
}

int fuzz_main(const struct fuzzer *fuzzer, int argc, char **argv)
{
	uint64_t seed = 1, iterations = 1000;
	int i = 1;

	message_init(fuzzer->name);
	for (; i + 1 < argc && argv[i][0] == '-'; i += 2) {
		if (!strcmp(argv[i], "--seed"))
			seed = strtoull(argv[i + 1], NULL, 10);
		else if (!strcmp(argv[i], "--iterations"))
			iterations = strtoull(argv[i + 1], NULL, 10);
	}
	if (i >= argc) {
		msg_error("usage: %s [--seed N] [--iterations N] %s...", fuzzer->name,
			  fuzzer->what);
		return EXIT_USAGE;
	}
	signal(SIGALRM, hung);
	for (; i < argc; i++)
		fuzz(fuzzer, argv[i], seed, iterations);
	return EXIT_OK;
}
