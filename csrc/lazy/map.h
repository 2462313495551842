/* SPDX-License-Identifier: MIT */
/*
 * The mappings of one address space, in memory: found by any thread at any time, without a lock,
 * while one thread adds. An insert-only skip list: what was published once is never moved or freed
 * before map_free().
 */
#ifndef LAZY_MAP_H
#define LAZY_MAP_H

#include <stdbool.h>
#include <stdint.h>

struct map;
struct source;

struct mapping {
	uint64_t offset; /* bytes, in the virtual data */
	uint64_t length; /* bytes */
	struct source *source;
	uint64_t source_offset; /* bytes */
};

struct map *map_new(void); /* NULL when memory is short */
/* The mappings, not their sources. */
void map_free(struct map *map);

/* The mapping that `offset` lies in; NULL: none. What it points to stays as it is. */
const struct mapping *map_find(const struct map *map, uint64_t offset);
/* The first mapping that ends behind `offset`; NULL: none. For going through all of them. */
const struct mapping *map_next(const struct map *map, uint64_t offset);
/* The first mapping that has bytes of the range; NULL: none. */
const struct mapping *map_overlap(const struct map *map, uint64_t offset, uint64_t length);

/*
 * One thread at a time. `offset + length` is below 2^64. Returns 0, -ENOMEM, or -EEXIST with
 * `*conflict` set to the first mapping that overlaps (it may be the same one again).
 */
int map_add(struct map *map, const struct mapping *mapping, const struct mapping **conflict);
/* Sees to it that the next `count` additions find memory. By the thread that adds. */
int map_reserve(struct map *map, uint64_t count);

/*
 * The lowest free range of `length` bytes at or after `from` that starts on a multiple of
 * `alignment` and ends by `end`. Returns false when there is none. By the thread that adds: what
 * was found is remembered, so that many searches in a full map take no longer than one.
 */
bool map_find_room(struct map *map, uint64_t from, uint64_t end, uint64_t length,
		   uint64_t alignment, uint64_t *offset);

uint64_t map_count(const struct map *map);

#endif
