/* SPDX-License-Identifier: MIT */
/*
 * How often units were wanted recently: a count-min sketch of fixed size (as in TinyLFU) in the
 * file `state`, shared by all processes, and a copy in memory. It also remembers evicted units. A
 * unit counts once per sweep, so many small reads in a row are one use.
 */
#include <stdlib.h>
#include <string.h>

#include "base/fileio.h"
#include "content/cache/internal.h"

enum {
	ROW = CACHE_FREQUENCY_COUNTERS / 2,
	PAGE_BYTES = 4096,
	PAGES = CACHE_FREQUENCY_COUNTERS / PAGE_BYTES,
	/* All counts are halved after this many uses per cached unit. */
	AGE_USES = 10,
	AGE_UNITS_MIN = 4096,
};

static unsigned place_of(uint64_t hash, unsigned row)
{
	return row * ROW + (unsigned)((row ? hash >> 40 : hash >> 8) & (ROW - 1));
}

static unsigned least_of(const uint8_t *frequency, uint64_t hash)
{
	unsigned first = frequency[place_of(hash, 0)], second = frequency[place_of(hash, 1)];

	return first < second ? first : second;
}

unsigned frequency_of(struct cache *cache, uint64_t hash)
{
	unsigned frequency;

	pthread_mutex_lock(&cache->frequency_lock);
	frequency = least_of(cache->frequency, hash);
	pthread_mutex_unlock(&cache->frequency_lock);
	return frequency;
}

/* NB: of a page that cannot be read, this process keeps its own counts. */
static void load(struct cache *cache)
{
	pread_full(cache->state_fd, cache->frequency, CACHE_FREQUENCY_COUNTERS,
		   sizeof(struct cache_state));
}

void frequency_load(struct cache *cache)
{
	pthread_mutex_lock(&cache->frequency_lock);
	load(cache);
	pthread_mutex_unlock(&cache->frequency_lock);
}

static void add(struct cache *cache, uint64_t hash, bool dirty[static PAGES])
{
	unsigned least = least_of(cache->frequency, hash);

	for (unsigned row = 0; row < 2 && least < CACHE_FREQUENCY_MAX; row++) {
		unsigned place = place_of(hash, row);

		if (cache->frequency[place] != least)
			continue;
		cache->frequency[place]++;
		dirty[place / PAGE_BYTES] = true;
	}
}

static void age(struct cache *cache, uint64_t added, bool dirty[static PAGES])
{
	const size_t place = offsetof(struct cache_state, frequency_added);
	uint64_t units = cache_bytes(cache) / SOURCE_UNIT_DEFAULT_BYTES;
	uint64_t most = AGE_USES * (units > AGE_UNITS_MIN ? units : AGE_UNITS_MIN);
	uint64_t before;

	if (state_read_number(cache, place, &before))
		return;
	added += before;
	if (added >= most) {
		for (unsigned i = 0; i < CACHE_FREQUENCY_COUNTERS; i++)
			cache->frequency[i] /= 2;
		memset(dirty, true, PAGES);
		added = 0;
	}
	state_write_number(cache, place, added);
}

bool frequency_sweep(struct cache *cache)
{
	bool dirty[PAGES] = {};
	uint64_t added = 0;

	for (unsigned i = 0; i < RECENT_SLOTS && !added; i++)
		added = __atomic_load_n(&cache->recent[i], __ATOMIC_RELAXED);
	if (!added || state_lock(cache))
		return false;
	added = 0;
	pthread_mutex_lock(&cache->frequency_lock);
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
			pwrite_full(cache->state_fd, cache->frequency + page * PAGE_BYTES,
				    PAGE_BYTES, sizeof(struct cache_state) + page * PAGE_BYTES);
	}
	pthread_mutex_unlock(&cache->frequency_lock);
	state_unlock(cache);
	return true;
}
