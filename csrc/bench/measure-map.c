/* SPDX-License-Identifier: MIT */
/*
 * measure-map FILE COUNT LOOKUPS THREADS: adds COUNT mappings to a new map at FILE, in one go, loads
 * it again, and looks up LOOKUPS random places in each of THREADS threads. Prints times as JSON.
 */
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/cleanup.h"
#include "base/message.h"
#include "lazy/map.h"
#include "lazy/store.h"

enum { LENGTH = 4096, STRIDE = 2 * LENGTH, THREADS_MAX = 64 };

struct looking {
	const struct map *map;
	uint64_t count, lookups;
	uint64_t random;
	uint64_t wrong;
	double seconds;
};

static double now_s(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

/* Looks up random places. Half of them are mapped, half are not. */
static void *look(void *argument)
{
	struct looking *looking = argument;
	double begin_s = now_s();

	for (uint64_t i = 0; i < looking->lookups; i++) {
		uint64_t place;
		const struct mapping *mapping;

		looking->random ^= looking->random << 13;
		looking->random ^= looking->random >> 7;
		looking->random ^= looking->random << 17;
		place = looking->random % (2 * looking->count) * LENGTH;
		mapping = map_find(looking->map, place);
		looking->wrong += (mapping != NULL) != (place % STRIDE == 0);
		looking->wrong += mapping && mapping->offset != place;
	}
	looking->seconds = now_s() - begin_s;
	return NULL;
}

/* Returns how many ns one look-up takes in one thread, or a negative number after errors. */
static double look_all(const struct map *map, uint64_t count, uint64_t lookups, unsigned threads)
{
	struct looking all[THREADS_MAX];
	pthread_t ids[THREADS_MAX];
	double seconds = 0;

	for (unsigned i = 0; i < threads; i++) {
		all[i] = (struct looking){
			.map = map,
			.count = count,
			.lookups = lookups,
			.random = 0x9e3779b97f4a7c15 * (i + 1),
		};
		if (pthread_create(&ids[i], NULL, look, &all[i]))
			return -1;
	}
	for (unsigned i = 0; i < threads; i++) {
		pthread_join(ids[i], NULL);
		seconds += all[i].wrong ? -1e9 : all[i].seconds;
	}
	return seconds * 1e9 / (double)threads / (double)lookups;
}

static int add(struct store *store, uint64_t count, double *seconds, struct error *error)
{
	_cleanup_free_ struct store_addition *additions = calloc(count, sizeof(*additions));
	json_t *sources = json_pack("[{s:s, s:i, s:I}]", "kind", "memset", "byte", 7, "size",
				    (json_int_t)1 << 40);
	double begin_s;
	int err;

	if (!additions || !sources)
		return -1;
	for (uint64_t i = 0; i < count; i++)
		additions[i] = (struct store_addition){ .offset = STRIDE * i, .length = LENGTH };
	begin_s = now_s();
	err = store_add(store, sources, additions, count, NULL, NULL, error);
	*seconds = now_s() - begin_s;
	json_decref(sources);
	return err;
}

static int measure(const char *path, uint64_t count, uint64_t lookups, unsigned threads)
{
	struct error error = {};
	struct store *store = NULL;
	struct map *map = map_new();
	double add_s = 0, begin_s, load_s, lookup_ns;
	int err = store_open(path, map, &store, &error);

	if (!err)
		err = add(store, count, &add_s, &error);
	store_close(store);
	map_free(map);
	if (err) {
		msg_error("%s", error.text);
		return EXIT_FAILED;
	}
	map = map_new();
	begin_s = now_s();
	err = store_open(path, map, &store, &error);
	load_s = now_s() - begin_s;
	lookup_ns = err ? -1 : look_all(map, count, lookups, threads);
	printf("{\"add_s\": %.6f, \"load_s\": %.6f, \"lookup_ns\": %.2f}\n", add_s, load_s,
	       lookup_ns);
	if (!err)
		store_close(store);
	map_free(map);
	return lookup_ns < 0 ? EXIT_FAILED : EXIT_OK;
}

int main(int argc, char **argv)
{
	uint64_t count = argc == 5 ? strtoull(argv[2], NULL, 10) : 0;
	uint64_t lookups = argc == 5 ? strtoull(argv[3], NULL, 10) : 0;
	unsigned long threads = argc == 5 ? strtoul(argv[4], NULL, 10) : 0;

	message_init("btrfs-ublk-measure-map");
	if (argc == 2 && !strcmp(argv[1], "--version"))
		return print_version();
	if (!count || count > UINT32_MAX || !lookups || !threads || threads > THREADS_MAX) {
		msg_error("usage: btrfs-ublk-measure-map FILE COUNT LOOKUPS THREADS");
		return EXIT_USAGE;
	}
	return measure(argv[1], count, lookups, (unsigned)threads);
}
