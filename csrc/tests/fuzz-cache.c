/* SPDX-License-Identifier: MIT */
/*
 * fuzz-cache: the files of a cache are changed, and it is opened and read. It may have less than
 * before, but what it says is right is right.
 *
 * What the cache's thread does is done where somebody waits for it: starting one takes longer than
 * all else that an input needs, and an input does the same each time.
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/fileio.h"
#include "base/list.h"
#include "lazy/cache.h"
#include "lazy/cache/admin.h"
#include "lazy/layout.h"
#include "lazy/worker_pool.h"
#include "tests/files.h"

static int wait_for_nobody(pthread_mutex_t *lock);

#define pthread_create(thread, attributes, start, argument) 0
#define clock_join(thread, wait_ms) (pending_main(cache), true)
#define pthread_cond_wait(condition, lock) wait_for_nobody(lock)
#define lazy_thread_init(name, what) (void)(name)
#include "lazy/cache/pending.c" /* NOLINT(bugprone-suspicious-include): to call pending_main() */
#undef pthread_create
#undef clock_join
#undef pthread_cond_wait
#undef lazy_thread_init

static int wait_for_nobody(pthread_mutex_t *lock)
{
	struct cache *cache = container_of(lock, struct cache, pending_lock);

	/* It ends when all is done. */
	pthread_mutex_unlock(lock);
	cache->stop = true;
	pending_main(cache);
	cache->stop = false;
	pthread_mutex_lock(lock);
	return 0;
}

enum { UNIT_BYTES = 4096, UNITS = 20, SIZE = UNITS * UNIT_BYTES - 100, CHANGES_MAX = 12 };

static struct fuzz_files files;
static uint8_t content[UNITS * UNIT_BYTES];
static const struct cache_options options = { .max_bytes = 1 << 30, .reserve_bytes = 1 };

static void open_it(struct cache **cache, struct source *source, struct cache_object **object)
{
	struct error error = {};
	int err = cache_open(files.directory, &options, cache, &error);

	*object = NULL;
	fuzz_require(!err || *error.text, "refused without a reason");
	if (err)
		*cache = NULL;
	else if (cache_object_open(*cache, source, object))
		*object = NULL;
}

static struct source source_of(void)
{
	struct source source = { .size = SIZE, .unit_bytes = UNIT_BYTES };

	memset(source.key, 0xa5, sizeof(source.key));
	return source;
}

static void read_all(const struct cache_object *object)
{
	uint8_t data[UNIT_BYTES];
	struct cache_lookup look;

	for (uint64_t unit = 0; unit < UNITS; unit++) {
		uint64_t offset = unit * UNIT_BYTES;

		if (!cache_lookup(object, unit, unit, &look) ||
		    pread_full(cache_fd(object), data, UNIT_BYTES, offset) ||
		    !cache_lookup_is_valid(object, &look) ||
		    !cache_verify(object, offset, data, UNIT_BYTES))
			continue;
		fuzz_require(!memcmp(data, content + offset, UNIT_BYTES), "wrong data");
	}
}

static void look(void)
{
	struct source source = source_of();
	struct cache_object *object;
	struct cache *cache;

	open_it(&cache, &source, &object);
	if (object) {
		read_all(object);
		cache_put(object, 1, content + UNIT_BYTES, UNIT_BYTES);
		cache_drop(object, 2);
		cache_sync(cache);
		read_all(object);
	}
	if (cache) {
		json_decref(cache_stats_json(cache));
		cache_shrink(cache, UNIT_BYTES);
		cache_close(cache);
	}
}

static void run(const uint8_t *data, size_t length)
{
	struct fuzz_input input = { data, length };

	fuzz_files_restore(&files);
	for (unsigned i = 0; i < CHANGES_MAX && input.length; i++)
		fuzz_files_change(&files, &input);
	look();
}

static void begin(const char *path)
{
	struct source source = source_of();
	struct cache_object *object;
	struct cache *cache;

	(void)path;
	fuzz_files_make(&files);
	for (size_t i = 0; i < SIZE; i++)
		content[i] = (uint8_t)(i / 7 + i * i / 4096);
	open_it(&cache, &source, &object);
	for (uint64_t unit = 0; object && unit < UNITS; unit++)
		fuzz_require(!cache_put(object, unit, content + unit * UNIT_BYTES,
					unit_extent(&source, unit).length),
			     "no place in memory");
	fuzz_require(object, "no cache");
	cache_sync(cache);
	cache_close(cache);
	fuzz_files_keep(&files);
}

static void end(void)
{
	fuzz_files_remove(&files);
}

static const struct fuzzer fuzzer = {
	.name = "fuzz-cache",
	.input_bytes = CHANGES_MAX * 13,
	.begin = begin,
	.run = run,
	.end = end,
};
FUZZ_PROGRAM(fuzzer)
