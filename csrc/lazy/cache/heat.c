/* SPDX-License-Identifier: MIT */
/*
 * How often units were wanted lately: a count-min sketch of fixed size (as TinyLFU has it) in the
 * file `state`, for all processes, and a copy of it in memory. It also remembers what was evicted. A
 * unit counts once per sweep, so that many small reads in a row are one use of it.
 */
#include <stdlib.h>
#include <string.h>

#include "base/fileio.h"
#include "lazy/cache/internal.h"

enum {
	ROW = CACHE_HEAT_COUNTERS / 2,
	PAGE_BYTES = 4096,
	PAGES = CACHE_HEAT_COUNTERS / PAGE_BYTES,
	/* After so many uses per unit that is there, all counts are halved. */
	AGE_USES = 10,
	AGE_UNITS_MIN = 4096,
};

static unsigned place_of(uint64_t hash, unsigned row)
{
	return row * ROW + (unsigned)((row ? hash >> 40 : hash >> 8) & (ROW - 1));
}

static unsigned least_of(const uint8_t *heat, uint64_t hash)
{
	unsigned first = heat[place_of(hash, 0)], second = heat[place_of(hash, 1)];

	return first < second ? first : second;
}

unsigned heat_of(struct cache *cache, uint64_t hash)
{
	unsigned heat;

	pthread_mutex_lock(&cache->heat_lock);
	heat = least_of(cache->heat, hash);
	pthread_mutex_unlock(&cache->heat_lock);
	return heat;
}

/* NB: a page that cannot be read keeps what this process knows. */
static void load(struct cache *cache)
{
	pread_full(cache->state_fd, cache->heat, CACHE_HEAT_COUNTERS, sizeof(struct cache_state));
}

void heat_load(struct cache *cache)
{
	pthread_mutex_lock(&cache->heat_lock);
	load(cache);
	pthread_mutex_unlock(&cache->heat_lock);
}

static void add(struct cache *cache, uint64_t hash, bool dirty[static PAGES])
{
	unsigned least = least_of(cache->heat, hash);

	for (unsigned row = 0; row < 2 && least < CACHE_HEAT_MAX; row++) {
		unsigned place = place_of(hash, row);

		if (cache->heat[place] != least)
			continue;
		cache->heat[place]++;
		dirty[place / PAGE_BYTES] = true;
	}
}

static void age(struct cache *cache, uint64_t added, bool dirty[static PAGES])
{
	const size_t place = offsetof(struct cache_state, heat_added);
	uint64_t units = cache_bytes(cache) / SOURCE_UNIT_DEFAULT_BYTES;
	uint64_t most = AGE_USES * (units > AGE_UNITS_MIN ? units : AGE_UNITS_MIN);
	uint64_t before;

	if (state_read_number(cache, place, &before))
		return;
	added += before;
	if (added >= most) {
		for (unsigned i = 0; i < CACHE_HEAT_COUNTERS; i++)
			cache->heat[i] /= 2;
		memset(dirty, true, PAGES);
		added = 0;
	}
	state_write_number(cache, place, added);
}

bool heat_sweep(struct cache *cache)
{
	bool dirty[PAGES] = {};
	uint64_t added = 0;

	for (unsigned i = 0; i < RECENT_SLOTS && !added; i++)
		added = __atomic_load_n(&cache->recent[i], __ATOMIC_RELAXED);
	if (!added || state_lock(cache))
		return false;
	added = 0;
	pthread_mutex_lock(&cache->heat_lock);
	load(cache);
	for (unsigned i = 0; i < RECENT_SLOTS; i++) {
		uint64_t hash;

		if (!__atomic_load_n(&cache->recent[i], __ATOMIC_RELAXED))
			continue;
		hash = __atomic_exchange_n(&cache->recent[i], 0, __ATOMIC_RELAXED);
		add(cache, hash, dirty);
		added++;
	}
	age(cache, added, dirty);
	for (unsigned page = 0; page < PAGES; page++) {
		if (dirty[page])
			pwrite_full(cache->state_fd, cache->heat + page * PAGE_BYTES, PAGE_BYTES,
				    sizeof(struct cache_state) + page * PAGE_BYTES);
	}
	pthread_mutex_unlock(&cache->heat_lock);
	state_unlock(cache);
	return true;
}
