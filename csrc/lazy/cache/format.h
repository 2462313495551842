/* SPDX-License-Identifier: MIT */
/*
 * What lies in the directory of a cache. All numbers are little-endian. docs/cache.md describes it.
 *
 * lock		flock(2): who adds or removes files, or evicts
 * state	bytes in use, and how often units were wanted: of no value after a crash of the machine
 * KEY.data	the units, each at its place; behind them (at a multiple of 4 KiB) the header once more
 * KEY.bits	the header, and which units are there; flock(2): who changes that
 * KEY.pin	empty: this content is never evicted
 */
#ifndef CACHE_FORMAT_H
#define CACHE_FORMAT_H

#include <assert.h>
#include <stddef.h>
#include <stdint.h>

#include "base/size.h"
#include "lazy/source.h"

#define CACHE_MAGIC "BUcache"

enum {
	CACHE_VERSION = 1,
	CACHE_HEADER_BYTES = 512, /* at the start of the bits, and at the end of the data */
	CACHE_GROUP_WORDS = 7,
	CACHE_GROUP_UNITS = 64 * CACHE_GROUP_WORDS,
	CACHE_ID_BYTES = 16,
	CACHE_HEAT_COUNTERS = 1 << 20,
	CACHE_HEAT_MAX = 15,
};

struct cache_header {
	char magic[8];
	uint32_t version;
	uint32_t unit_bytes;
	uint64_t size; /* of the source */
	uint8_t key[SOURCE_KEY_BYTES];
	uint8_t id[CACHE_ID_BYTES]; /* random: which data these bits belong to */
	uint8_t zero[CACHE_HEADER_BYTES - 80];
	uint64_t checksum; /* FNV-1a, 64 bits, of all before it */
} __attribute__((packed));
static_assert(sizeof(struct cache_header) == CACHE_HEADER_BYTES, "on disk");

/* A line of the CPU's cache. Unit `n` is bit `n % 448` of group `n / 448`. */
struct cache_group {
	uint64_t evictions; /* goes up after bits were cleared, and before data vanish */
	uint64_t bits[CACHE_GROUP_WORDS];
};
static_assert(sizeof(struct cache_group) == 64, "on disk");

/* At the start of `state`. Behind it: a sketch of two rows of CACHE_HEAT_COUNTERS / 2 bytes. */
struct cache_state {
	char magic[8];
	uint32_t version;
	uint32_t zero;
	uint64_t bytes; /* units that are there, of all contents */
	uint64_t heat_added;
	uint8_t unused[4096 - 32];
};
static_assert(sizeof(struct cache_state) == 4096, "on disk");

static inline uint64_t cache_data_bytes(uint64_t size)
{
	return round_up_u64(size, BLOCK_BYTES);
}

static inline uint64_t cache_group_count(uint64_t units)
{
	return (units + CACHE_GROUP_UNITS - 1) / CACHE_GROUP_UNITS;
}

#endif
