/* SPDX-License-Identifier: MIT */
/*
 * map-race COUNT THREADS: adds COUNT mappings in a random order while THREADS look them up. Its exit
 * status is 1 if a thread ever got a wrong answer.
 */
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/cleanup.h"
#include "base/message.h"
#include "content/map.h"
#include "content/source.h"

enum { SOURCES = 16, THREADS_MAX = 16, STRIDE = 3 * 4096, LENGTH = 2 * 4096 };

static struct source sources[SOURCES];

struct race {
	struct map *map;
	uint64_t count;
	uint32_t *order; /* the order in which they are added */
	uint64_t added;	 /* how many of `order` readers have to find */
	bool over;
};

static bool is_right(const struct mapping *mapping, uint64_t number)
{
	return mapping && mapping->offset == number * STRIDE && mapping->length == LENGTH &&
	       mapping->source == &sources[number % SOURCES] && mapping->source_offset == number;
}

static void *look(void *argument)
{
	struct race *race = argument;
	unsigned state = (unsigned)(uintptr_t)&state;
	uint64_t wrong = 0;

	while (!__atomic_load_n(&race->over, __ATOMIC_ACQUIRE)) {
		uint64_t added = __atomic_load_n(&race->added, __ATOMIC_ACQUIRE);
		uint64_t any = (uint64_t)rand_r(&state) % race->count;
		const struct mapping *mapping = map_find(race->map, any * STRIDE + 4096);

		/* This one may have been added already. Then it has to be right. */
		wrong += mapping && !is_right(mapping, any);
		wrong += map_find(race->map, any * STRIDE + LENGTH) != NULL;
		if (added) {
			uint64_t number = race->order[(uint64_t)rand_r(&state) % added];

			wrong += !is_right(map_find(race->map, number * STRIDE), number);
			wrong += !is_right(map_next(race->map, number * STRIDE), number);
		}
	}
	return (void *)(uintptr_t)wrong;
}

static int run_race(struct race *race, unsigned threads)
{
	pthread_t ids[THREADS_MAX];
	uint64_t wrong = 0;

	for (unsigned i = 0; i < threads; i++) {
		if (pthread_create(&ids[i], NULL, look, race))
			return EXIT_FAILED;
	}
	for (uint64_t i = 0; i < race->count; i++) {
		uint64_t number = race->order[i];
		const struct mapping *conflict;

		wrong += map_add(race->map,
				 &(struct mapping){ number * STRIDE, LENGTH,
						    &sources[number % SOURCES], number },
				 &conflict) != 0;
		__atomic_store_n(&race->added, i + 1, __ATOMIC_RELEASE);
	}
	__atomic_store_n(&race->over, true, __ATOMIC_RELEASE);
	for (unsigned i = 0; i < threads; i++) {
		void *of_thread;

		pthread_join(ids[i], &of_thread);
		wrong += (uintptr_t)of_thread;
	}
	printf("%" PRIu64 " mappings, %" PRIu64 " wrong\n", map_count(race->map), wrong);
	return wrong || map_count(race->map) != race->count ? EXIT_FAILED : EXIT_OK;
}

static int start_race(uint64_t count, unsigned threads)
{
	_cleanup_free_ uint32_t *order = calloc(count, sizeof(*order));
	struct race race = { .map = map_new(), .count = count, .order = order };
	unsigned state = 1;
	int status;

	if (!order || !race.map)
		return EXIT_FAILED;
	for (uint32_t i = 0; i < count; i++) {
		uint32_t other = (uint32_t)rand_r(&state) % (i + 1);

		order[i] = order[other];
		order[other] = i;
	}
	status = run_race(&race, threads);
	map_free(race.map);
	return status;
}

int main(int argc, char **argv)
{
	message_init("map-race");
	if (argc == 3) {
		unsigned long count = strtoul(argv[1], NULL, 10);
		unsigned long threads = strtoul(argv[2], NULL, 10);

		if (count && count <= UINT32_MAX && threads <= THREADS_MAX)
			return start_race(count, (unsigned)threads);
	}
	msg_error("usage: map-race COUNT THREADS");
	return EXIT_USAGE;
}
