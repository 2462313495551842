/* SPDX-License-Identifier: MIT */
/*
 * cache-shell DIRECTORY MAX_BYTES RESERVE_BYTES: a cache, driven by lines on standard input. A
 * unit's data follow from its key and its place (see fill()), so that each read can be verified.
 *
 *   open INDEX KEY SIZE UNIT	ok
 *   put INDEX UNIT		ok
 *   read INDEX FIRST LAST	miss | changed | ok | rotten (by its checksums) | wrong
 *   check INDEX			a letter for each unit: o(k), m(iss), c(hanged), r(otten), w(rong)
 *   drop INDEX UNIT		ok
 *   shrink BYTES		ok
 *   sync			ok
 *   reopen DIRECTORY		ok: the cache there, with no source open
 *   stats			JSON
 *   stress SECONDS THREADS	READS HITS CHANGED PUTS WRONG: random operations on all open sources
 *
 * Each may answer "error ERRNO" instead.
 */
#include <errno.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/fileio.h"
#include "base/message.h"
#include "content/cache/admin.h"
#include "content/cache/internal.h"
#include "content/layout.h"

enum { SOURCES = 16, THREADS_MAX = 16 };

static struct cache *cache;
static struct cache_options options;
static struct source sources[SOURCES];

struct worker {
	pthread_t thread;
	uint64_t random, until_ns;
	uint64_t reads, hits, changed, puts, wrong;
};

/* Fills each 8 bytes with splitmix64 of the key's first 8 bytes and their own offset. */
static void fill(const struct source *source, uint64_t offset, uint64_t length, uint8_t *data)
{
	uint64_t seed;

	memcpy(&seed, source->key, sizeof(seed));
	memset(data, 0, length);
	for (uint64_t at = 0; at < length && offset + at < source->size; at += 8) {
		uint64_t rest = source->size - offset - at;
		uint64_t word = (le64toh(seed) ^ (offset + at)) + 0x9e3779b97f4a7c15u;

		word = (word ^ word >> 30) * 0xbf58476d1ce4e5b9u;
		word = (word ^ word >> 27) * 0x94d049bb133111ebu;
		word = htole64(word ^ word >> 31);
		memcpy(data + at, &word, rest < 8 ? rest : 8);
	}
}

static int put(const struct source *source, uint64_t unit)
{
	struct cache_object *object = cache_object_of(source);
	uint32_t length;
	uint8_t *data;
	int err;

	if (!object || unit >= source_units(source))
		return -EINVAL;
	length = unit_extent(source, unit).length;
	data = malloc(length);
	if (!data)
		return -ENOMEM;
	fill(source, unit_extent(source, unit).offset, length, data);
	err = cache_put(object, unit, data, length);
	free(data);
	return err;
}

static const char *read_units(const struct source *source, uint64_t first, uint64_t last)
{
	struct cache_object *object = cache_object_of(source);
	uint64_t offset = unit_extent(source, first).offset;
	uint64_t end = round_up_u64(source->size, BLOCK_BYTES);
	const char *answer = "ok";
	struct cache_lookup look;
	uint8_t *data, *expected;
	int err;

	if (!object || !cache_lookup(object, first, last, &look))
		return "miss";
	if (unit_end_offset(source, last) < end)
		end = unit_end_offset(source, last);
	data = malloc(2 * (end - offset));
	if (!data)
		return "error 12";
	expected = data + (end - offset);
	err = pread_full(cache_fd(object), data, end - offset, offset);
	fill(source, offset, end - offset, expected);
	if (!cache_lookup_is_valid(object, &look))
		answer = "changed";
	else if (err || !cache_verify(object, offset, data, (uint32_t)(end - offset)))
		answer = "rotten";
	else if (memcmp(data, expected, end - offset))
		answer = "wrong";
	free(data);
	return answer;
}

static uint64_t next(struct worker *worker)
{
	worker->random ^= worker->random << 13;
	worker->random ^= worker->random >> 7;
	worker->random ^= worker->random << 17;
	return worker->random;
}

static void *work(void *argument)
{
	struct worker *worker = argument;

	while (clock_now_ns() < worker->until_ns) {
		const struct source *source = &sources[next(worker) % SOURCES];
		uint64_t units, unit;
		const char *answer;

		if (!source->size)
			continue;
		units = source_units(source);
		/* Half of all operations are in the first eighth. */
		unit = next(worker) % 2 ? next(worker) % units : next(worker) % (units / 8 + 1);
		answer = read_units(source, unit,
				    unit + 1 < units && next(worker) % 4 == 0 ? unit + 1 : unit);
		worker->reads++;
		if (!strcmp(answer, "ok")) {
			worker->hits++;
			if (next(worker) % 256 == 0)
				cache_drop(cache_object_of(source), unit);
		} else if (!strcmp(answer, "miss")) {
			worker->puts += !put(source, unit);
		} else if (!strcmp(answer, "changed")) {
			worker->changed++;
		} else {
			worker->wrong++;
		}
	}
	return NULL;
}

static void stress(unsigned seconds, unsigned threads)
{
	struct worker workers[THREADS_MAX] = {}, sum = {};

	for (unsigned i = 0; i < threads; i++) {
		workers[i].random = (uint64_t)getpid() << 8 | (i + 1);
		workers[i].until_ns = clock_now_ns() + seconds * 1000000000ull;
		pthread_create(&workers[i].thread, NULL, work, &workers[i]);
	}
	for (unsigned i = 0; i < threads; i++) {
		pthread_join(workers[i].thread, NULL);
		sum.reads += workers[i].reads;
		sum.hits += workers[i].hits;
		sum.changed += workers[i].changed;
		sum.puts += workers[i].puts;
		sum.wrong += workers[i].wrong;
	}
	printf("%" PRIu64 " %" PRIu64 " %" PRIu64 " %" PRIu64 " %" PRIu64 "\n", sum.reads, sum.hits,
	       sum.changed, sum.puts, sum.wrong);
}

static int open_source(unsigned index, const char *key, uint64_t size, uint32_t unit_bytes)
{
	struct cache_object *object;
	struct source *source = &sources[index % SOURCES];

	if (strlen(key) != 2 * SOURCE_KEY_BYTES || !cache_key_parse(key, source->key))
		return -EINVAL;
	source->size = size;
	source->unit_bytes = unit_bytes;
	return cache_object_open(cache, source, &object);
}

static void check(const struct source *source)
{
	for (uint64_t unit = 0; unit < source_units(source); unit++)
		putchar(*read_units(source, unit, unit));
	putchar('\n');
}

static int reopen(const char *directory)
{
	struct error error = {};
	int err;

	cache_close(cache);
	cache = NULL;
	memset(sources, 0, sizeof(sources));
	err = cache_open(directory, &options, &cache, &error);
	if (!err)
		return 0;
	msg_error("%s", error.text);
	exit(EXIT_FAILED);
}

static void print_result(int err)
{
	if (err)
		printf("error %d\n", -err);
	else
		puts("ok");
}

static bool answer(const char *line)
{
	uint64_t first, last, size;
	unsigned index, number;
	char key[80], path[200];

	if (sscanf(line, "reopen %199s", path) == 1) {
		print_result(reopen(path));
	} else if (sscanf(line, "check %u", &index) == 1) {
		check(&sources[index % SOURCES]);
	} else if (sscanf(line, "open %u %79s %" SCNu64 " %u", &index, key, &size, &number) == 4) {
		print_result(open_source(index, key, size, number));
	} else if (sscanf(line, "put %u %" SCNu64, &index, &first) == 2) {
		print_result(put(&sources[index % SOURCES], first));
	} else if (sscanf(line, "read %u %" SCNu64 " %" SCNu64, &index, &first, &last) == 3) {
		puts(read_units(&sources[index % SOURCES], first, last));
	} else if (sscanf(line, "drop %u %" SCNu64, &index, &first) == 2) {
		print_result(cache_drop(cache_object_of(&sources[index % SOURCES]), first));
	} else if (sscanf(line, "shrink %" SCNu64, &size) == 1) {
		print_result(cache_shrink(cache, size));
	} else if (sscanf(line, "stress %u %u", &index, &number) == 2 && number <= THREADS_MAX) {
		stress(index, number);
	} else if (!strcmp(line, "sync\n")) {
		cache_sync(cache);
		puts("ok");
	} else if (!strcmp(line, "stats\n")) {
		json_t *stats = cache_stats_json(cache);

		json_dumpf(stats, stdout, JSON_COMPACT);
		putchar('\n');
		json_decref(stats);
	} else {
		return false;
	}
	fflush(stdout);
	return true;
}

int main(int argc, char **argv)
{
	struct error error = {};
	char line[256];

	message_init("cache-shell");
	if (argc != 4)
		return EXIT_USAGE;
	options.max_bytes = strtoull(argv[2], NULL, 10);
	options.reserve_bytes = strtoull(argv[3], NULL, 10);
	if (cache_open(argv[1], &options, &cache, &error)) {
		msg_error("%s", error.text);
		if (*error.hint)
			msg_hint("%s", error.hint);
		return EXIT_FAILED;
	}
	while (fgets(line, sizeof(line), stdin)) {
		if (!answer(line)) {
			msg_error("what is '%s'?", line);
			return EXIT_USAGE;
		}
	}
	cache_close(cache);
	return EXIT_OK;
}
