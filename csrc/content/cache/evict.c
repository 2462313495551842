/* SPDX-License-Identifier: MIT */
/*
 * Chooses the units to evict. There are two classes, as in S3-FIFO: *probation*, a queue of the
 * units that this process has put last, where units that were not wanted again go first; and all
 * others: a sample of them is taken (random runs in random contents), and the least wanted go. So a
 * scan evicts its own units, not those in use. The state is approximate, and of fixed size.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/statvfs.h>

#include "base/clock.h"
#include "content/cache/admin.h"
#include "content/cache/internal.h"

enum {
	BATCH_PART = 32,	     /* part of the cap that is evicted at a time, */
	BATCH_MOST_BYTES = 64 << 20, /* but at most this much */
	BATCH_MOST_UNITS = 2048,
	PROBATION_PART = 10,
	SAMPLES = 8, /* samples of as many units as are needed */
	RUN_UNITS = 64,
	SPARED_MOST = 4096, /* units to spare that are looked at in one content */
	ROUNDS = 512,
	FOREIGN_MOST = 8, /* contents to open for one eviction */
	KEEP_PART = 64,
};

static const uint64_t contents_old_ns = 30 * 1000000000ull;
static const uint64_t recount_old_ns = 600 * 1000000000ull;
static const uint64_t reserve_pause_ns = 1000000000ull;
static const uint64_t full_pause_ns = 1000000000ull;

struct victim {
	struct cache_object *object;
	uint64_t unit;
	unsigned frequency;
	unsigned round;
};

struct victims {
	struct victim list[BATCH_MOST_UNITS * (SAMPLES + 1)];
	uint64_t units[BATCH_MOST_UNITS];
	size_t count;
	uint64_t bytes;
	uint64_t random;
	struct cache_object *foreign[FOREIGN_MOST];
	unsigned foreign_count;
	const struct cache_ranges *spared; /* NULL: nothing is */
	const struct cache_object *asked;  /* the content whose pin was checked last */
	bool asked_pinned;
};

static uint64_t next_random(struct victims *victims)
{
	/* xorshift64 is good enough to choose where to look. */
	victims->random ^= victims->random << 13;
	victims->random ^= victims->random >> 7;
	victims->random ^= victims->random << 17;
	return victims->random;
}

static bool is_pinned(struct cache *cache, struct victims *victims,
		      const struct cache_object *object)
{
	if (victims->asked != object) {
		victims->asked = object;
		victims->asked_pinned = content_is_pinned(cache, object->name);
	}
	return victims->asked_pinned;
}

static void victims_add(struct victims *victims, struct cache_object *object, uint64_t unit,
			unsigned round)
{
	victims->list[victims->count++] = (struct victim){
		.object = object,
		.unit = unit,
		.frequency = frequency_of(object->cache, unit_hash(object, unit)),
		.round = round,
	};
	victims->bytes += object_unit_bytes(object, unit);
}

void probation_add(struct cache_object *object, uint64_t unit)
{
	struct cache *cache = object->cache;
	struct probation *probation = &cache->probation;
	unsigned at;

	pthread_mutex_lock(&cache->pending_lock);
	if (probation->count == PROBATION_SLOTS) {
		/* The queue is full: its oldest unit joins the others. */
		at = probation->first++ % PROBATION_SLOTS;
		probation->bytes -= probation->ring[at].object->unit_bytes;
		probation->count--;
	}
	at = (probation->first + probation->count++) % PROBATION_SLOTS;
	probation->ring[at].object = object;
	probation->ring[at].unit = unit;
	probation->bytes += object->unit_bytes;
	pthread_mutex_unlock(&cache->pending_lock);
}

static bool probation_next(struct cache *cache, uint64_t keep_bytes, struct cache_object **object,
			   uint64_t *unit)
{
	struct probation *probation = &cache->probation;
	bool found = false;
	unsigned at;

	pthread_mutex_lock(&cache->pending_lock);
	if (probation->count && probation->bytes > keep_bytes) {
		at = probation->first++ % PROBATION_SLOTS;
		*object = probation->ring[at].object;
		*unit = probation->ring[at].unit;
		probation->count--;
		probation->bytes -= (*object)->unit_bytes;
		found = true;
	}
	pthread_mutex_unlock(&cache->pending_lock);
	return found;
}

static void take_probation(struct cache *cache, struct victims *victims, uint64_t target)
{
	uint64_t keep = (cache_max_bytes(cache) ? cache_max_bytes(cache) : cache_bytes(cache)) /
			PROBATION_PART;
	struct cache_object *object;
	uint64_t unit;

	while (victims->bytes < target && victims->count < BATCH_MOST_UNITS &&
	       probation_next(cache, keep, &object, &unit)) {
		/* It was wanted more than once: from now on it is one of the others. */
		if (object_has(object, unit) && !is_pinned(cache, victims, object) &&
		    !ranges_contain(victims->spared, object, unit) &&
		    frequency_of(cache, unit_hash(object, unit)) <= 1)
			victims_add(victims, object, unit, 0);
	}
}

static int compare_places(const void *left, const void *right)
{
	const struct victim *a = left, *b = right;

	if (a->object != b->object)
		return a->object < b->object ? -1 : 1;
	return a->unit < b->unit ? -1 : a->unit > b->unit;
}

static int compare_frequency(const void *left, const void *right)
{
	const struct victim *a = left, *b = right;

	if (a->frequency != b->frequency)
		return a->frequency < b->frequency ? -1 : 1;
	if (a->round != b->round)
		return a->round < b->round ? -1 : 1;
	return compare_places(left, right);
}

/* Picks a content at random, weighted by its size, or returns NULL. */
static struct cache_object *pick_content(struct cache *cache, struct victims *victims)
{
	struct error error = {};
	struct cache_object *object;
	uint64_t total = 0, at;
	size_t i;

	for (i = 0; i < cache->content_count; i++)
		total += cache->contents[i].disk_bytes + 1;
	if (!total)
		return NULL;
	at = next_random(victims) % total;
	for (i = 0; at > cache->contents[i].disk_bytes; i++)
		at -= cache->contents[i].disk_bytes + 1;
	for (unsigned f = 0; f < victims->foreign_count; f++) {
		if (!strcmp(victims->foreign[f]->name, cache->contents[i].name))
			return victims->foreign[f];
	}
	if (victims->foreign_count == FOREIGN_MOST)
		return victims->foreign[next_random(victims) % FOREIGN_MOST];
	if (content_acquire(cache, &cache->contents[i], &object, &error))
		return NULL;
	if (!object->listed)
		victims->foreign[victims->foreign_count++] = object;
	return object;
}

/* Adds a run of cached units from a random position on. */
static void sample_run(struct victims *victims, struct cache_object *object, unsigned round)
{
	uint64_t groups = cache_group_count(object->units);
	uint64_t start = next_random(victims) % object->units;
	unsigned found = 0, spared = 0;

	for (uint64_t i = 0; i <= groups && found < RUN_UNITS; i++) {
		uint64_t group = (start / CACHE_GROUP_UNITS + i) % groups;
		uint64_t unit = group * CACHE_GROUP_UNITS;
		uint64_t end = unit + CACHE_GROUP_UNITS;

		if (i == 0)
			unit = start;
		if (end > object->units)
			end = object->units;
		for (; unit < end && found < RUN_UNITS; unit++) {
			if (victims->count == sizeof(victims->list) / sizeof(*victims->list))
				return;
			if (!object_has(object, unit))
				continue;
			if (ranges_contain(victims->spared, object, unit)) {
				if (++spared == SPARED_MOST)
					return;
				continue;
			}
			victims_add(victims, object, unit, round);
			found++;
		}
	}
}

static void take_samples(struct cache *cache, struct victims *victims, uint64_t target)
{
	/* Sort only the sample: units from probation go in any case. */
	struct victim *sampled = victims->list + victims->count;
	uint64_t wanted = victims->bytes + SAMPLES * (target - victims->bytes);
	size_t count, kept = 0;

	for (unsigned round = 0; round < ROUNDS && victims->bytes < wanted; round++) {
		struct cache_object *object = pick_content(cache, victims);

		if (object && !is_pinned(cache, victims, object))
			sample_run(victims, object, round);
	}
	count = (size_t)(victims->list + victims->count - sampled);
	qsort(sampled, count, sizeof(*sampled), compare_places);
	for (size_t i = 0; i < count; i++) {
		if (!kept || compare_places(&sampled[kept - 1], &sampled[i]))
			sampled[kept++] = sampled[i];
	}
	victims->count = (size_t)(sampled - victims->list) + kept;
	qsort(sampled, kept, sizeof(*sampled), compare_frequency);
}

/* Evicts from the start of the list until `target` is reached. Returns the number of bytes. */
static int64_t evict_victims(struct cache *cache, struct victims *victims, uint64_t target)
{
	uint64_t bytes = 0;
	int64_t evicted = 0;
	size_t count = 0;

	while (count < victims->count && count < BATCH_MOST_UNITS && bytes < target) {
		bytes += object_unit_bytes(victims->list[count].object, victims->list[count].unit);
		count++;
	}
	qsort(victims->list, count, sizeof(*victims->list), compare_places);
	for (size_t i = 0, same; i < count; i += same) {
		struct cache_object *object = victims->list[i].object;
		uint64_t cleared = 0;
		int64_t result;

		for (same = 0; i + same < count && victims->list[i + same].object == object; same++)
			victims->units[same] = victims->list[i + same].unit;
		result = object_evict(object, victims->units, same, false, &cleared);
		if (result < 0)
			return evicted ? evicted : result;
		evicted += result;
		cache_count(&cache->counters.evicted_units, cleared);
	}
	cache_count(&cache->counters.evicted_bytes, (uint64_t)evicted);
	return evicted;
}

/*
 * Returns how many bytes were evicted, or a negative errno. The caller holds the directory's lock.
 */
static int64_t evict_some(struct cache *cache, uint64_t target, const struct cache_ranges *spared)
{
	struct victims *victims = calloc(1, sizeof(*victims));
	int64_t evicted;
	int err = 0;

	if (!victims)
		return -ENOMEM;
	victims->spared = spared;
	if (getrandom(&victims->random, sizeof(victims->random), GRND_NONBLOCK) < 0)
		victims->random = clock_now_ns();
	victims->random |= 1;
	if (!cache->contents_read_ns || clock_now_ns() - cache->contents_read_ns > contents_old_ns)
		err = contents_read(cache);
	if (!err && clock_now_ns() - cache->recounted_ns > recount_old_ns)
		err = cache_recount(cache);
	if (err) {
		free(victims);
		return err;
	}
	frequency_load(cache);
	take_probation(cache, victims, target);
	if (victims->bytes < target)
		take_samples(cache, victims, target);
	evicted = evict_victims(cache, victims, target);
	for (unsigned i = 0; i < victims->foreign_count; i++)
		content_release(victims->foreign[i]);
	free(victims);
	/* If nothing was found, the sum or the list of contents is wrong. */
	if (!evicted)
		err = cache_recount(cache);
	return err ?: evicted;
}

static uint64_t over_cap(struct cache *cache, uint64_t bytes)
{
	uint64_t used = cache_bytes(cache) + cache_pending_bytes(cache) + bytes;

	return cache_max_bytes(cache) && used > cache_max_bytes(cache) ?
		       used - cache_max_bytes(cache) :
		       0;
}

static uint64_t below_reserve(const struct cache *cache, uint64_t bytes)
{
	struct statvfs system;
	uint64_t left;

	if (fstatvfs(cache->dir_fd, &system))
		return 0;
	left = (uint64_t)system.f_bavail * system.f_frsize;
	bytes += cache_reserve_bytes(cache);
	return left < bytes ? bytes - left : 0;
}

static uint64_t batch_bytes(const struct cache *cache, uint64_t needed)
{
	uint64_t all = cache_max_bytes(cache) ? cache_max_bytes(cache) : cache_bytes(cache);
	uint64_t batch = all / BATCH_PART;

	if (batch > BATCH_MOST_BYTES)
		batch = BATCH_MOST_BYTES;
	return needed > batch ? needed : batch;
}

/* The caller holds the directory's lock. */
static int make_room(struct cache *cache, uint64_t bytes, bool disk_full)
{
	uint64_t over = over_cap(cache, bytes), below;
	int64_t evicted;

	while (over) {
		evicted = evict_some(cache, batch_bytes(cache, over), NULL);
		over = over_cap(cache, bytes);
		if (evicted < 0)
			return (int)evicted;
		if (!evicted)
			break;
	}
	if (over)
		return -ENOSPC;
	below = disk_full ? bytes : below_reserve(cache, bytes);
	if (!below)
		return 0;
	/* Some file systems free space late. Do not evict everything meanwhile. */
	if (cache->reserve_evicted_ns &&
	    clock_now_ns() - cache->reserve_evicted_ns < reserve_pause_ns)
		return -ENOSPC;
	cache->reserve_evicted_ns = clock_now_ns();
	evicted = evict_some(cache, batch_bytes(cache, below), NULL);
	if (evicted < 0)
		return (int)evicted;
	return !disk_full && below_reserve(cache, bytes) ? -ENOSPC : evicted ? 0 : -ENOSPC;
}

int cache_make_room(struct cache *cache, uint64_t bytes, bool disk_full)
{
	int err = 0;

	if (cache_max_bytes(cache) && bytes > cache_max_bytes(cache))
		return -ENOSPC;
	for (unsigned attempt = 0; attempt < 2; attempt++) {
		if (!disk_full && !over_cap(cache, bytes) && !below_reserve(cache, bytes))
			return 0;
		if (clock_now_ns() < __atomic_load_n(&cache->full_until_ns, __ATOMIC_RELAXED))
			return -ENOSPC;
		/*
		 * Units on their way to the disk cannot be evicted; units in use would be instead.
		 */
		if (cache_pending_bytes(cache) > cache_max_bytes(cache) / PROBATION_PART)
			cache_sync(cache);
		err = cache_lock(cache);
		if (err)
			return err;
		err = make_room(cache, bytes, disk_full);
		cache_unlock(cache);
		if (err != -ENOSPC || !over_cap(cache, bytes))
			return err;
		cache_sync(cache);
	}
	__atomic_store_n(&cache->full_until_ns, clock_now_ns() + full_pause_ns, __ATOMIC_RELAXED);
	return err;
}

void cache_keep_room(struct cache *cache)
{
	uint64_t ahead = cache_max_bytes(cache) / KEEP_PART;

	if (!over_cap(cache, ahead) || cache_lock(cache))
		return;
	/* NB: failing to evict is no error here; cache_put() will report it. */
	make_room(cache, ahead, false);
	cache_unlock(cache);
}

uint64_t cache_capacity(struct cache *cache, uint64_t *used)
{
	uint64_t max = cache_max_bytes(cache), capacity;
	struct statvfs system;

	*used = cache_bytes(cache) + cache_pending_bytes(cache);
	capacity = max ? max - max / KEEP_PART : INT64_MAX;
	if (!fstatvfs(cache->dir_fd, &system)) {
		uint64_t left = (uint64_t)system.f_bavail * system.f_frsize;
		uint64_t reserve = cache_reserve_bytes(cache);
		uint64_t spare = left > reserve ? left - reserve : 0;

		/* The file system needs some of it itself. */
		spare -= spare / KEEP_PART;
		if (capacity > *used + spare)
			capacity = *used + spare;
	}
	return capacity;
}

uint64_t evict_others(struct cache *cache, const struct cache_ranges *ranges, uint64_t bytes)
{
	uint64_t evicted = 0;

	while (evicted < bytes) {
		int64_t more = evict_some(cache, bytes - evicted, ranges);

		if (more <= 0)
			break;
		evicted += (uint64_t)more;
	}
	return evicted;
}

int cache_shrink(struct cache *cache, uint64_t bytes)
{
	int err = cache_lock(cache);

	if (err)
		return err;
	err = cache_recount(cache);
	while (!err && cache_bytes(cache) > bytes) {
		int64_t evicted = evict_some(cache, cache_bytes(cache) - bytes, NULL);

		if (evicted <= 0) {
			err = evicted < 0 ? (int)evicted : -ENOSPC;
			break;
		}
	}
	cache_unlock(cache);
	return err;
}
