/* SPDX-License-Identifier: MIT */
/*
 * PROGRAM [--seed N] [--iterations N] [--corpus DIRECTORY] PATH...: has a fuzzer look at strings of
 * bytes, in one process. With a corpus, these are its files, and then files of it that are changed
 * at random; else they are random. Some programs take no PATH. In a build with -Dfuzz=true, clang's
 * libFuzzer makes the strings and has its own options; FUZZ_PATH has the PATHs then, between colons.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { FUZZ_INPUT_BYTES_MAX = 4096, FUZZ_DIRECTORY_BYTES = 128 };

struct fuzzer {
	const char *name;
	const char *what;				 /* its arguments are; NULL: it has none */
	size_t input_bytes;				 /* at most, FUZZ_INPUT_BYTES_MAX */
	void (*run)(const uint8_t *data, size_t length); /* must leave all as it was */
	/* May both be NULL. With libFuzzer, for all PATHs, before the first run; else each PATH has its
	 * own runs and end. */
	void (*begin)(const char *path);
	void (*end)(void);
};

int fuzz_main(const struct fuzzer *fuzzer, int argc, char **argv);
/* For libFuzzer: begins at the first call. */
int fuzz_one(const struct fuzzer *fuzzer, const uint8_t *data, size_t length);
/* Ends the program in a way that each fuzzer reports: something that must hold does not. */
void fuzz_require(bool holds, const char *what);

/*
 * Makes a directory in TMPDIR, else in memory. libFuzzer ends without end() where an input fails:
 * its caller removes what is in TMPDIR.
 */
void fuzz_directory(char path[static FUZZ_DIRECTORY_BYTES]);

/* The rest of an input. Behind its end there are zeroes. */
struct fuzz_input {
	const uint8_t *data;
	size_t length;
};

/* Takes a number of so many bytes, the first one highest. */
uint64_t fuzz_take(struct fuzz_input *input, size_t bytes);

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
