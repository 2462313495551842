/* SPDX-License-Identifier: MIT */
/*
 * The mappings of one address space, in memory. Any thread may search them at any time without a
 * lock, while one thread adds. It is an insert-only skip list: what was published is neither moved
 * nor freed before map_free().
 */
#pragma once

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

struct map *map_new(void); /* Returns NULL when memory is short. */
/* Frees the mappings, but not their sources. */
void map_free(struct map *map);

/* Returns the mapping that contains `offset`, or NULL. The result stays valid. */
const struct mapping *map_find(const struct map *map, uint64_t offset);
/* Returns the first mapping that ends behind `offset`, or NULL. For iterating over all of them. */
const struct mapping *map_next(const struct map *map, uint64_t offset);
/* Returns the one after it, or NULL. */
const struct mapping *map_after(const struct map *map, const struct mapping *mapping);
/* Returns the first mapping that overlaps the range, or NULL. */
const struct mapping *map_overlap(const struct map *map, uint64_t offset, uint64_t length);

/*
 * Adds a mapping. Only one thread may do so at a time. `offset + length` must be below 2^64.
 * Returns 0, -ENOMEM, or -EEXIST with `*conflict` set to the first mapping that overlaps, which may
 * be an identical one.
 */
int map_add(struct map *map, const struct mapping *mapping, const struct mapping **conflict);
/* Allocates memory for the next `count` additions. Only for the thread that adds. */
int map_reserve(struct map *map, uint64_t count);

/*
 * Finds the lowest free range of `length` bytes at or after `from` that starts on a multiple of
 * `alignment` and ends at or before `end`. Returns false when there is none. Only for the thread
 * that adds. Results are remembered, so that many searches in a full map take no longer than one.
 */
bool map_find_room(struct map *map, uint64_t from, uint64_t end, uint64_t length,
		   uint64_t alignment, uint64_t *offset);

uint64_t map_count(const struct map *map);
