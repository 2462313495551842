/* SPDX-License-Identifier: MIT */
/*
 * What lies in the directory of a cache. All numbers are little-endian. docs/cache.md describes it.
 *
 * lock		flock(2): held to add or remove files, or to evict
 * state	bytes in use, and how often units were wanted: of no value after a crash of the machine
 * KEY.data	the units, each at its place; behind them (at a multiple of 4 KiB) the header once more, and
 *		(at a multiple of 64 KiB) a crc32c of each block of 4 KiB
 * KEY.bits	the header, and which units are there; flock(2): held to change that
 * KEY.pin	empty: this content is never evicted
 */
#pragma once

#include <assert.h>
#include <stddef.h>
#include <stdint.h>

#include "base/size.h"
#include "content/source.h"

#define CACHE_MAGIC "BUcache"

enum {
	CACHE_VERSION = 2,	  /* of contents; version 1 had no checksums */
	CACHE_STATE_VERSION = 1,  /* of `state` and `limits` */
	CACHE_HEADER_BYTES = 512, /* at the start of the bits, and at the end of the data */
	CACHE_GROUP_WORDS = 7,
	CACHE_GROUP_UNITS = 64 * CACHE_GROUP_WORDS,
	CACHE_ID_BYTES = 16,
	CACHE_FREQUENCY_MAX = 15,
};
/* A fuzzer has fewer, as it reads all of them for each input. */
#ifndef CACHE_FREQUENCY_COUNTERS
#define CACHE_FREQUENCY_COUNTERS (1 << 20)
#endif

struct cache_header {
	char magic[8];
	uint32_t version;
	uint32_t unit_bytes;
	uint64_t size; /* of the source */
	uint8_t key[SOURCE_KEY_BYTES];
	uint8_t id[CACHE_ID_BYTES]; /* random; ties the bits to their data */
	uint8_t zero[CACHE_HEADER_BYTES - 80];
	uint64_t checksum; /* FNV-1a, 64 bits, of all fields before it */
} __attribute__((packed));
static_assert(sizeof(struct cache_header) == CACHE_HEADER_BYTES, "on disk");

/* One line of the CPU's cache. Unit `n` is bit `n % 448` of group `n / 448`. */
struct cache_group {
	/* incremented after bits were cleared, and before the data are removed */
	uint64_t evictions;
	uint64_t bits[CACHE_GROUP_WORDS];
};
static_assert(sizeof(struct cache_group) == 64, "on disk");

/*
 * The start of `state`. It is followed by a sketch of two rows of CACHE_FREQUENCY_COUNTERS / 2
 * bytes.
 */
struct cache_state {
	char magic[8];
	uint32_t version;
	uint32_t zero;
	uint64_t bytes; /* of cached units, over all contents */
	uint64_t frequency_added;
	uint8_t unused[4096 - 32];
};
static_assert(sizeof(struct cache_state) == 4096, "on disk");

static inline uint64_t cache_data_bytes(uint64_t size)
{
	return round_up_u64(size, BLOCK_BYTES);
}

/* A checksum as it is stored: crc32c, little-endian, without the final inversion. */
typedef uint32_t le_sum;

/* This offset can be mapped with any page size that kernels have. */
static inline uint64_t cache_sums_at(uint64_t size)
{
	return round_up_u64(cache_data_bytes(size) + CACHE_HEADER_BYTES, 64 << 10);
}

static inline uint64_t cache_sums_bytes(uint64_t size)
{
	return cache_data_bytes(size) / BLOCK_BYTES * sizeof(le_sum);
}

static inline uint64_t cache_file_bytes(uint64_t size)
{
	return cache_sums_at(size) + cache_sums_bytes(size);
}

static inline uint64_t cache_group_count(uint64_t units)
{
	return (units + CACHE_GROUP_UNITS - 1) / CACHE_GROUP_UNITS;
}
