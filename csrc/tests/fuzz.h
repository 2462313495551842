/* SPDX-License-Identifier: MIT */
/*
 * PROGRAM [--seed N] [--iterations N] PATH...: has a fuzzer look at strings of bytes, in one
 * process. Without libFuzzer the strings are random; with it (clang -fsanitize=fuzzer
 * -DFUZZ_LIBFUZZER, FUZZ_PATH=path) it makes them.
 */
#ifndef TESTS_FUZZ_H
#define TESTS_FUZZ_H

#include <stddef.h>
#include <stdint.h>

enum { FUZZ_INPUT_BYTES_MAX = 4096 };

struct fuzzer {
	const char *name, *what; /* of the program, and of its arguments */
	size_t input_bytes;	 /* at most, FUZZ_INPUT_BYTES_MAX */
	void (*begin)(const char *path);
	void (*run)(const uint8_t *data, size_t length); /* must leave all as it was */
	void (*end)(void);
};

int fuzz_main(const struct fuzzer *fuzzer, int argc, char **argv);
/* For libFuzzer: what FUZZ_PATH names is begun at the first call. */
int fuzz_one(const struct fuzzer *fuzzer, const uint8_t *data, size_t length);

#ifdef FUZZ_LIBFUZZER
#define FUZZ_PROGRAM(fuzzer)                                            \
	int LLVMFuzzerTestOneInput(const uint8_t *data, size_t length); \
	int LLVMFuzzerTestOneInput(const uint8_t *data, size_t length)  \
	{                                                               \
		return fuzz_one(&(fuzzer), data, length);               \
	}
#else
#define FUZZ_PROGRAM(fuzzer)                             \
	int main(int argc, char **argv)                  \
	{                                                \
		return fuzz_main(&(fuzzer), argc, argv); \
	}
#endif

#endif
