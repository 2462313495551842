/* SPDX-License-Identifier: MIT */
#include "tests/fuzz.h"

#include <dirent.h>
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/message.h"

enum { ITERATION_SECONDS_MAX = 20, CORPUS_FILES_MAX = 256 };

/* What random inputs are made from. */
static struct example {
	uint8_t *data;
	size_t length;
} examples[CORPUS_FILES_MAX];
static size_t example_count;

void fuzz_require(bool holds, const char *what)
{
	if (holds)
		return;
	fprintf(stderr, "fuzz: %s\n", what);
	abort();
}

void fuzz_directory(char path[static FUZZ_DIRECTORY_BYTES])
{
	snprintf(path, FUZZ_DIRECTORY_BYTES, "%s/fuzz-XXXXXX", getenv("TMPDIR") ?: "/dev/shm");
	if (mkdtemp(path))
		return;
	perror(path);
	exit(EXIT_FAILED);
}

uint64_t fuzz_take(struct fuzz_input *input, size_t bytes)
{
	uint64_t value = 0;

	for (; bytes && input->length; bytes--, input->length--)
		value = value << 8 | *input->data++;
	return value;
}

static void begin_all(const struct fuzzer *fuzzer)
{
	char *paths, *rest, *path;

	if (!fuzzer->begin)
		return;
	paths = rest = strdup(getenv("FUZZ_PATH") ?: "");
	if (!fuzzer->what)
		fuzzer->begin(NULL);
	while (fuzzer->what && (path = strsep(&rest, ":")))
		fuzzer->begin(path);
	free(paths);
}

int fuzz_one(const struct fuzzer *fuzzer, const uint8_t *data, size_t length)
{
	static bool has_begun;

	if (!has_begun) {
		begin_all(fuzzer);
		if (fuzzer->end)
			atexit(fuzzer->end);
	}
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

/* Changes an example in one way: a byte, a part that is repeated or left out, another's part. */
static size_t change(uint8_t *data, size_t length, size_t most, uint64_t *state)
{
	const struct example *other = &examples[random_next(state) % example_count];
	size_t at = length ? random_next(state) % length : 0, part = length - at, from;

	if (part > 1)
		part = 1 + random_next(state) % (part < 32 ? part : 32);
	switch (random_next(state) % 5) {
	case 0:
		if (length)
			data[at] = (uint8_t)random_next(state);
		return length;
	case 1:
		if (length)
			data[at] ^= (uint8_t)(1 << random_next(state) % 8);
		return length;
	case 2:
		memmove(data + at, data + at + part, length - at - part);
		return length - part;
	case 3:
		if (length + part > most)
			return length;
		memmove(data + at + part, data + at, length - at);
		return length + part;
	default:
		from = other->length ? random_next(state) % other->length : 0;
		part = other->length - from;
		if (part > most - at)
			part = most - at;
		if (part)
			memcpy(data + at, other->data + from, part);
		return at + part;
	}
}

static size_t make_input(uint8_t *data, size_t most, uint64_t *state)
{
	const struct example *example;
	size_t length;

	if (!example_count) {
		length = 6 + random_next(state) % (most - 6);
		/* Mostly make few changes: with many, already the first checks fail. */
		if (random_next(state) % 4)
			length = 6 + length % 14;
		for (size_t b = 0; b < length; b++)
			data[b] = (uint8_t)random_next(state);
		return length;
	}
	example = &examples[random_next(state) % example_count];
	length = example->length < most ? example->length : most;
	if (length)
		memcpy(data, example->data, length);
	for (unsigned count = 1 + random_next(state) % 6; count; count--)
		length = change(data, length, most, state);
	return length;
}

static void fuzz(const struct fuzzer *fuzzer, const char *path, uint64_t seed, uint64_t iterations)
{
	uint8_t data[FUZZ_INPUT_BYTES_MAX];

	if (fuzzer->begin)
		fuzzer->begin(path);
	alarm(ITERATION_SECONDS_MAX);
	for (size_t i = 0; i < example_count; i++)
		fuzzer->run(examples[i].data, examples[i].length);
	for (uint64_t i = 0; i < iterations; i++) {
		uint64_t state = seed + i;
		size_t length = make_input(data, fuzzer->input_bytes, &state);

		hang_text_length = (size_t)snprintf(hang_text, sizeof(hang_text),
						    "%s: --seed %" PRIu64 " --iterations 1 hangs\n",
						    fuzzer->name, seed + i);
		alarm(ITERATION_SECONDS_MAX);
		fuzzer->run(data, length);
	}
	alarm(0);
	if (fuzzer->end)
		fuzzer->end();
}

static int is_shown(const struct dirent *entry)
{
	return entry->d_name[0] != '.';
}

static void load_corpus(const char *directory, size_t most)
{
	struct dirent **entries = NULL;
	int count = scandir(directory, &entries, is_shown, alphasort);
	char path[4096];

	for (int i = 0; i < count; i++) {
		struct example *example = &examples[example_count];
		FILE *file;

		snprintf(path, sizeof(path), "%s/%s", directory, entries[i]->d_name);
		free(entries[i]);
		file = example_count < CORPUS_FILES_MAX ? fopen(path, "rb") : NULL;
		if (!file)
			continue;
		example->data = malloc(most);
		example->length = example->data ? fread(example->data, 1, most, file) : 0;
		example_count += example->data != NULL;
		fclose(file);
	}
	free(entries);
}

int fuzz_main(const struct fuzzer *fuzzer, int argc, char **argv)
{
	uint64_t seed = 1, iterations = 1000;
	const char *corpus = NULL;
	int i = 1;

	message_init(fuzzer->name);
	for (; i + 1 < argc && argv[i][0] == '-'; i += 2) {
		if (!strcmp(argv[i], "--seed"))
			seed = strtoull(argv[i + 1], NULL, 10);
		else if (!strcmp(argv[i], "--iterations"))
			iterations = strtoull(argv[i + 1], NULL, 10);
		else if (!strcmp(argv[i], "--corpus"))
			corpus = argv[i + 1];
	}
	if ((i < argc) != (fuzzer->what != NULL)) {
		msg_error("usage: %s [--seed N] [--iterations N] [--corpus DIRECTORY] %s...",
			  fuzzer->name, fuzzer->what ?: "");
		return EXIT_USAGE;
	}
	if (corpus)
		load_corpus(corpus, fuzzer->input_bytes);
	if (corpus && !example_count) {
		msg_error("there is nothing in %s", corpus);
		return EXIT_FAILED;
	}
	signal(SIGALRM, hung);
	if (!fuzzer->what)
		fuzz(fuzzer, NULL, seed, iterations);
	for (; i < argc; i++)
		fuzz(fuzzer, argv[i], seed, iterations);
	for (size_t e = 0; e < example_count; e++)
		free(examples[e].data);
	return EXIT_OK;
}
