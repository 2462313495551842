/* SPDX-License-Identifier: MIT */
/*
 * Units on their way to the disk, and the thread that brings them there: data, sync, bits, sync.
 * Units that come during a sync share the next one.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/fileio.h"
#include "base/message.h"
#include "base/worker_pool.h"
#include "content/cache/internal.h"

enum {
	STOP_WAIT_MS = 5000,
	GATHER_MS = 50, /* how long others may join after the first unit */
	SWEEP_MS = 1000,
	SWEEP_IDLE_MS = 16000,
	FULL_BYTES = 32 << 20,	/* of waiting units: do not gather more */
	MOST_BYTES = 128 << 20, /* of waiting units: a thread that puts more waits */
	MOST_SLOTS = PENDING_SLOTS * 3 / 4,
};

struct batch {
	size_t count;
	struct entry {
		struct cache_object *object;
		uint64_t unit;
		unsigned slot;
	} entries[PENDING_SLOTS];
	uint64_t units[PENDING_SLOTS];
};

static struct pending *slot_of(struct cache *cache, const struct cache_object *object,
			       uint64_t unit, unsigned probe)
{
	return &cache->pending[(unit_hash(object, unit) / 2 + probe) & (PENDING_SLOTS - 1)];
}

bool pending_has(const struct cache_object *object, uint64_t unit, uint64_t evictions)
{
	for (unsigned probe = 0; probe < PENDING_PROBES; probe++) {
		const struct pending *slot = slot_of(object->cache, object, unit, probe);
		uint64_t sequence = __atomic_load_n(&slot->sequence, __ATOMIC_ACQUIRE);
		bool same = __atomic_load_n(&slot->object, __ATOMIC_RELAXED) == object &&
			    __atomic_load_n(&slot->unit, __ATOMIC_RELAXED) == unit &&
			    __atomic_load_n(&slot->evictions, __ATOMIC_RELAXED) == evictions;

		__atomic_thread_fence(__ATOMIC_ACQUIRE);
		if (same && !(sequence & 1) &&
		    __atomic_load_n(&slot->sequence, __ATOMIC_RELAXED) == sequence)
			return true;
	}
	return false;
}

static void slot_set(struct pending *slot, struct cache_object *object, uint64_t unit,
		     uint64_t evictions)
{
	__atomic_store_n(&slot->sequence, slot->sequence + 1, __ATOMIC_RELAXED);
	__atomic_thread_fence(__ATOMIC_RELEASE);
	__atomic_store_n(&slot->object, object, __ATOMIC_RELAXED);
	__atomic_store_n(&slot->unit, unit, __ATOMIC_RELAXED);
	__atomic_store_n(&slot->evictions, evictions, __ATOMIC_RELAXED);
	__atomic_store_n(&slot->sequence, slot->sequence + 1, __ATOMIC_RELEASE);
}

void pending_follow(struct cache_object *object, uint64_t group, uint64_t before,
		    const uint64_t *units, size_t count)
{
	struct cache *cache = object->cache;

	pthread_mutex_lock(&cache->pending_lock);
	for (unsigned i = 0; i < PENDING_SLOTS && cache->pending_count; i++) {
		struct pending *slot = &cache->pending[i];
		bool evicted = false;

		if (slot->object != object || slot->unit / CACHE_GROUP_UNITS != group ||
		    slot->evictions != before)
			continue;
		for (size_t at = 0; at < count; at++)
			evicted |= units[at] == slot->unit;
		if (!evicted)
			slot_set(slot, object, slot->unit, before + 1);
	}
	pthread_mutex_unlock(&cache->pending_lock);
}

static struct pending *find_free(struct cache *cache, const struct cache_object *object,
				 uint64_t unit)
{
	if (cache->pending_count >= MOST_SLOTS || cache->pending_bytes >= MOST_BYTES)
		return NULL;
	for (unsigned probe = 0; probe < PENDING_PROBES; probe++) {
		struct pending *slot = slot_of(cache, object, unit, probe);

		if (!slot->object)
			return slot;
	}
	return NULL;
}

int pending_add(struct cache_object *object, uint64_t unit, uint64_t evictions)
{
	struct cache *cache = object->cache;
	struct pending *slot;
	bool first;

	pthread_mutex_lock(&cache->pending_lock);
	while (!(slot = find_free(cache, object, unit))) {
		cache->waiting++;
		pthread_cond_signal(&cache->wake);
		pthread_cond_wait(&cache->drained, &cache->pending_lock);
		cache->waiting--;
	}
	first = !cache->pending_count++;
	cache->pending_bytes += object_unit_bytes(object, unit);
	slot->taken = false;
	slot_set(slot, object, unit, evictions);
	if (first || cache->pending_bytes >= FULL_BYTES)
		pthread_cond_signal(&cache->wake);
	pthread_mutex_unlock(&cache->pending_lock);
	return 0;
}

uint64_t cache_pending_bytes(struct cache *cache)
{
	uint64_t bytes;

	pthread_mutex_lock(&cache->pending_lock);
	bytes = cache->pending_bytes;
	pthread_mutex_unlock(&cache->pending_lock);
	return bytes;
}

/*
 * Wait for two batches: units that were put before may be too late for the current one. Do not wait
 * until nothing is pending, since others may put units all the time.
 */
void cache_sync(struct cache *cache)
{
	uint64_t enough;

	pthread_mutex_lock(&cache->pending_lock);
	enough = cache->finished + 2;
	while (cache->pending_count && cache->finished < enough) {
		cache->waiting++;
		pthread_cond_signal(&cache->wake);
		pthread_cond_wait(&cache->drained, &cache->pending_lock);
		cache->waiting--;
	}
	pthread_mutex_unlock(&cache->pending_lock);
}

static int compare_entries(const void *left, const void *right)
{
	const struct entry *a = left, *b = right;

	if (a->object != b->object)
		return a->object < b->object ? -1 : 1;
	return a->unit < b->unit ? -1 : a->unit > b->unit;
}

static void give_up(struct cache_object *object, const char *what, int err)
{
	if (__atomic_exchange_n(&object->failed, true, __ATOMIC_RELAXED))
		return;
	msg_warning("cannot %s %s in the cache '%s': %s; nothing more is put into it", what,
		    object->name, object->cache->path, strerror(-err));
}

/*
 * Whether the unit's data are still there. If another process, which does not know of the unit, has
 * evicted from its group, the checksums decide. The caller holds the object's lock.
 */
static bool is_there(struct cache_object *object, const struct entry *entry, bool *read)
{
	struct cache *cache = object->cache;
	uint64_t evictions;

	pthread_mutex_lock(&cache->pending_lock);
	evictions = cache->pending[entry->slot].evictions;
	pthread_mutex_unlock(&cache->pending_lock);
	if (evictions == object_evictions(object, entry->unit))
		return true;
	*read = true;
	return sums_match_file(object, entry->unit);
}

static int vouch(struct cache_object *object, const struct entry *entries, size_t count,
		 uint64_t *units)
{
	struct cache *cache = object->cache;
	size_t kept = 0;
	uint64_t bytes = 0;
	bool read = false;
	int64_t set;

	for (size_t i = 0; i < count; i++) {
		uint64_t unit = entries[i].unit;

		/* Two threads have put the same unit. */
		if ((kept && units[kept - 1] == unit) || !is_there(object, &entries[i], &read))
			continue;
		if (!object_has(object, unit))
			bytes += object_unit_bytes(object, unit);
		units[kept++] = unit;
	}
	cache_count(&cache->counters.lost_units, count - kept);
	/* What another process has written meanwhile may not be on the disk. */
	if (read && fdatasync(object->data_fd))
		return -errno;
	set = object_set_bits(object, units, kept, true);
	if (set < 0)
		return (int)set;
	cache_add_bytes(cache, (int64_t)bytes);
	cache_count(&cache->counters.durable_units, (uint64_t)set);
	return (int)kept;
}

/* Their bytes are counted as cached, or not at all. */
static void forget_bytes(const struct cache_object *object, const struct entry *entries,
			 size_t count)
{
	struct cache *cache = object->cache;

	pthread_mutex_lock(&cache->pending_lock);
	for (size_t i = 0; i < count; i++)
		cache->pending_bytes -= object_unit_bytes(object, entries[i].unit);
	pthread_mutex_unlock(&cache->pending_lock);
}

static void commit(struct cache_object *object, const struct entry *entries, size_t count,
		   uint64_t *units)
{
	struct cache *cache = object->cache;
	int kept;

	cache_count(&cache->counters.syncs, 1);
	if (fdatasync(object->data_fd)) {
		cache_count(&cache->counters.lost_units, count);
		give_up(object, "sync", -errno);
		forget_bytes(object, entries, count);
		return;
	}
	kept = object_lock(object);
	if (!kept && !object_is_whole(object)) {
		cache_count(&cache->counters.lost_units, count);
		object_unlock(object);
		forget_bytes(object, entries, count);
		return;
	}
	if (!kept) {
		kept = vouch(object, entries, count, units);
		object_unlock(object);
	}
	forget_bytes(object, entries, count);
	if (kept < 0) {
		if (kept != -ENOSPC && kept != -EDQUOT)
			give_up(object, "write", kept);
		return;
	}
	for (int i = 0; i < kept; i++)
		probation_add(object, units[i]);
	if (fdatasync(object->bits_fd) || (!object->entered && fsync(cache->dir_fd)))
		give_up(object, "sync", -errno);
	else
		object->entered = true;
}

static void take_batch(struct cache *cache, struct batch *batch)
{
	batch->count = 0;
	for (unsigned i = 0; i < PENDING_SLOTS; i++) {
		struct pending *slot = &cache->pending[i];

		if (!slot->object)
			continue;
		slot->taken = true;
		batch->entries[batch->count++] = (struct entry){ slot->object, slot->unit, i };
	}
}

static void commit_batch(struct batch *batch)
{
	struct entry *entries = batch->entries;

	qsort(entries, batch->count, sizeof(*entries), compare_entries);
	for (size_t i = 0, same; i < batch->count; i += same) {
		for (same = 1; i + same < batch->count; same++) {
			if (entries[i + same].object != entries[i].object)
				break;
		}
		commit(entries[i].object, entries + i, same, batch->units);
	}
}

/* To be called after the bits were set, so that readers always see one of the two. */
static void free_slots(struct cache *cache)
{
	for (unsigned i = 0; i < PENDING_SLOTS; i++) {
		struct pending *slot = &cache->pending[i];

		if (!slot->object || !slot->taken)
			continue;
		cache->pending_count--;
		slot_set(slot, NULL, 0, 0);
	}
	cache->finished++;
	pthread_cond_broadcast(&cache->drained);
}

/* Returns false when the time is over. The caller holds the lock. */
static bool wait_until(struct cache *cache, uint64_t ns)
{
	const struct timespec until = { (time_t)(ns / 1000000000u), (long)(ns % 1000000000u) };

	return pthread_cond_timedwait(&cache->wake, &cache->pending_lock, &until) != ETIMEDOUT;
}

static void gather(struct cache *cache)
{
	uint64_t until = clock_now_ns() + GATHER_MS * 1000000ull;

	while (!cache->stop && !cache->waiting && cache->pending_bytes < FULL_BYTES &&
	       cache->pending_count < MOST_SLOTS && wait_until(cache, until))
		;
}

static void *pending_main(void *argument)
{
	struct cache *cache = argument;
	struct batch *batch = cache->batch;
	uint64_t swept = clock_now_ns();
	unsigned pause_ms = SWEEP_MS;

	lazy_thread_init("cache", CONFINE_FETCH);
	pthread_mutex_lock(&cache->pending_lock);
	while (!cache->stop || cache->pending_count) {
		bool due;

		if (!cache->pending_count && !cache->stop)
			wait_until(cache, swept + pause_ms * 1000000ull);
		if (cache->pending_count) {
			gather(cache);
			take_batch(cache, batch);
			pthread_mutex_unlock(&cache->pending_lock);
			commit_batch(batch);
			pthread_mutex_lock(&cache->pending_lock);
			free_slots(cache);
			pthread_mutex_unlock(&cache->pending_lock);
			cache_keep_room(cache);
			pthread_mutex_lock(&cache->pending_lock);
		}
		due = clock_now_ns() >= swept + pause_ms * 1000000ull;
		if (!due)
			continue;
		pthread_mutex_unlock(&cache->pending_lock);
		limits_refresh(cache);
		/* An idle cache rarely wakes the machine. */
		if (frequency_sweep(cache))
			pause_ms = SWEEP_MS;
		else if (pause_ms < SWEEP_IDLE_MS)
			pause_ms *= 2;
		swept = clock_now_ns();
		pthread_mutex_lock(&cache->pending_lock);
	}
	pthread_mutex_unlock(&cache->pending_lock);
	frequency_sweep(cache);
	return NULL;
}

int pending_start(struct cache *cache)
{
	int err;

	cache->batch = malloc(sizeof(*cache->batch));
	if (!cache->batch)
		return -ENOMEM;
	err = -pthread_create(&cache->thread, NULL, pending_main, cache);
	cache->running = !err;
	return err;
}

int pending_stop(struct cache *cache)
{
	if (!cache->running)
		return 0;
	pthread_mutex_lock(&cache->pending_lock);
	cache->stop = true;
	pthread_cond_signal(&cache->wake);
	pthread_mutex_unlock(&cache->pending_lock);
	if (!clock_join(cache->thread, STOP_WAIT_MS))
		return -ETIMEDOUT;
	free(cache->batch);
	cache->running = false;
	return 0;
}
