/* SPDX-License-Identifier: MIT */
/*
 * What the parts of the cache share.
 *
 * Locks are taken in this order: the directory's (cache_lock()), objects_lock, an object's
 * (object_lock()), state_lock(), frequency_lock, pending_lock. Readers take none.
 */
#pragma once

#include <endian.h>
#include <pthread.h>
#include <sys/types.h>

#include "content/cache.h"
#include "content/cache/format.h"

enum {
	CACHE_NAME_BYTES = 2 * SOURCE_KEY_BYTES + 1,
	CACHE_OBJECTS_MAX = 4096, /* open at a time; each has two descriptors and some pages */
	PENDING_SLOTS = 2048,	  /* a power of two */
	PENDING_PROBES = 8,
	RECENT_SLOTS = 4096, /* a power of two */
	PROBATION_SLOTS = 16384,
};

struct cache_object {
	struct cache *cache;
	struct cache_object *next;
	struct cache_header header;
	char name[CACHE_NAME_BYTES]; /* of its files, without the ending */
	uint64_t size;
	uint32_t unit_bytes;
	uint64_t units;
	uint64_t seed; /* for the hashes of its units */
	int data_fd;   /* holds a shared flock() while it is open */
	int bits_fd;
	const struct cache_group *groups;
	const void *mapped;
	size_t mapped_bytes;
	const le_sum *sums; /* mapped checksums of blocks; 0 where nothing was put yet */
	bool in_memory;
	bool entered; /* its directory entries are durable; only for the cache's thread */
	bool failed;  /* its disk refuses data, so nothing more is put */
	bool damaged; /* atomic: its files were truncated, so nothing in them is used */
	bool listed;  /* in cache->objects, until the cache is closed */
	pthread_mutex_t lock;
};

/*
 * A unit that is written but not durable; this process can read it. Slots change under
 * pending_lock. Readers check `sequence` before and after (odd: it is changing).
 */
struct pending {
	uint64_t sequence;
	struct cache_object *object; /* NULL: free */
	uint64_t unit;
	uint64_t evictions; /* of its group, before the unit was written */
	bool taken;	    /* the cache's thread is making it durable */
};

/*
 * The units that were put last, oldest first. They are evicted before others unless they were
 * wanted again.
 */
struct probation {
	struct {
		struct cache_object *object;
		uint64_t unit;
	} ring[PROBATION_SLOTS];
	unsigned first, count;
	uint64_t bytes;
};

struct cache_counters {
	uint64_t put_units, put_bytes, durable_units, evicted_units, evicted_bytes;
	uint64_t dropped_units, lost_units, no_room, failed, syncs;
};

struct cache {
	struct cache_options options; /* atomic: from `limits`, unless given by the caller */
	uint64_t default_reserve_bytes;
	char *path;
	int dir_fd;
	int lock_fd;
	int state_fd;
	int limits_error;
	pthread_mutex_t state_lock; /* together with a lock of the file */
	pthread_mutex_t frequency_lock;
	uint8_t *frequency;   /* CACHE_FREQUENCY_COUNTERS, as last read */
	pthread_mutex_t lock; /* together with lock_fd */
	bool has_state;	      /* under that lock: state_open() is done */

	pthread_mutex_t objects_lock;
	struct cache_object *objects;
	unsigned object_count;		/* atomic, because statistics must not wait for a disk */
	bool has_own_limits, in_memory; /* as found when the cache was opened */
	bool stop, running;
	uint64_t mapped_bytes;

	pthread_mutex_t pending_lock;
	pthread_cond_t wake;	/* for the cache's thread */
	pthread_cond_t drained; /* signalled when slots became free */
	struct pending pending[PENDING_SLOTS];
	unsigned pending_count;
	unsigned waiting;  /* number of threads that wait for `drained` */
	uint64_t finished; /* batches */
	uint64_t pending_bytes;
	struct probation probation;
	struct cache_counters counters; /* atomic */
	pthread_t thread;
	struct batch *batch; /* only for the cache's thread */

	uint64_t recent[RECENT_SLOTS]; /* hashes of units that were wanted since the last sweep */

	struct content *contents; /* the directory as last read; under its lock */
	size_t content_count, content_room;
	uint64_t contents_read_ns;
	uint64_t recounted_ns;
	uint64_t reserve_evicted_ns;
	/* atomic: nothing could be evicted, so do not try again before this */
	uint64_t full_until_ns;
};

static inline uint64_t cache_count(uint64_t *counter, uint64_t amount)
{
	return __atomic_fetch_add(counter, amount, __ATOMIC_RELAXED);
}

static inline uint64_t cache_max_bytes(const struct cache *cache)
{
	return __atomic_load_n(&cache->options.max_bytes, __ATOMIC_RELAXED);
}

static inline uint64_t cache_reserve_bytes(const struct cache *cache)
{
	return __atomic_load_n(&cache->options.reserve_bytes, __ATOMIC_RELAXED);
}

/* limits.c. Any thread may call this. */
int limits_read(struct cache *cache, struct error *error);
/* Only for the cache's thread. */
void limits_refresh(struct cache *cache);
/* The reserve that was set, or 0. */
uint64_t limits_reserve(const struct cache *cache);
/*
 * Sets the limits of all servers. 0 means no cap, or a reserve of a twentieth. The caller has
 * locked the cache.
 */
int limits_write(struct cache *cache, uint64_t max_bytes, uint64_t reserve_bytes,
		 struct error *error);

/*
 * lock.c: processes, and the threads of each, exclude each other. The first lock of a process opens
 * the directory's state.
 */
int cache_lock(struct cache *cache);
/* Waits no longer than that: -EAGAIN. `error` is about the state. */
int cache_lock_soon(struct cache *cache, unsigned ms, struct error *error);
void cache_unlock(struct cache *cache);
int object_lock(struct cache_object *object);
void object_unlock(struct cache_object *object);

/* object.c. The caller holds the directory's lock. */
struct content_shape {
	uint64_t size;
	uint32_t unit_bytes;
};
/* With `shape` NULL, the content must exist (-ENOENT), and its files say the shape. */
int object_open(struct cache *cache, const uint8_t key[static SOURCE_KEY_BYTES],
		const struct content_shape *shape, struct cache_object **object,
		struct error *error);
void object_close(struct cache_object *object);
/* Removes the files of a content. -EBUSY: a process has it open. */
int content_remove(struct cache *cache, const char *name);
/* Parses a key of hexadecimal digits. Returns false when `text` does not begin with one. */
bool cache_key_parse(const char *text, uint8_t key[static SOURCE_KEY_BYTES]);

/* whole.c: checks whether its files were truncated. If so, warns once and marks it as damaged. */
bool object_is_whole(struct cache_object *object);
/*
 * To be called when it is opened: drops units whose bit is set but whose data are a hole. Returns 0
 * or a negative errno.
 */
int object_check_data(struct cache_object *object);

/* sums.c: map and unmap the checksums when an object is opened or closed. */
int sums_map(struct cache_object *object);
void sums_unmap(struct cache_object *object);
/* Writes the checksums of a unit that is being put. Returns 0 or a negative errno. */
int sums_write(const struct cache_object *object, uint64_t unit, const uint8_t *data,
	       uint32_t length);
/* Checks whether the file still has the data that were put. Waits for the disk. */
bool sums_match_file(const struct cache_object *object, uint64_t unit);

/*
 * guard.c: instead of SIGBUS, `*damaged` is set, and zeroes are read from then on. Returns 0 or
 * -ENOMEM.
 */
int guard_add(const void *mapped, size_t bytes, bool *damaged);
void guard_remove(const void *mapped);

/* files.c: headers, and files that are made or refused. The caller holds the directory's lock. */
struct content_files {
	int data_fd, bits_fd;
	struct cache_header header;
};
int content_files_open(struct cache *cache, const char *name,
		       const uint8_t key[static SOURCE_KEY_BYTES],
		       const struct content_shape *shape, struct content_files *files,
		       struct error *error);

static inline bool object_is_damaged(const struct cache_object *object)
{
	return __atomic_load_n(&object->damaged, __ATOMIC_RELAXED);
}

static inline uint64_t object_evictions(const struct cache_object *object, uint64_t unit)
{
	const struct cache_group *group = &object->groups[unit / CACHE_GROUP_UNITS];

	return le64toh(__atomic_load_n(&group->evictions, __ATOMIC_ACQUIRE));
}

static inline bool object_has(const struct cache_object *object, uint64_t unit)
{
	const struct cache_group *group = &object->groups[unit / CACHE_GROUP_UNITS];
	unsigned bit = unit % CACHE_GROUP_UNITS;
	uint64_t word = le64toh(__atomic_load_n(&group->bits[bit / 64], __ATOMIC_ACQUIRE));

	return word >> bit % 64 & 1;
}

/* Where unit `unit` begins in the file, and the unit that contains byte `at` of it. */
static inline uint64_t object_place(const struct cache_object *object, uint64_t unit)
{
	return unit * object->unit_bytes;
}

static inline uint64_t object_unit_at(const struct cache_object *object, uint64_t at)
{
	return at / object->unit_bytes;
}

/* How many bytes unit `unit` takes in the file. */
static inline uint64_t object_unit_bytes(const struct cache_object *object, uint64_t unit)
{
	uint64_t rest = cache_data_bytes(object->size) - object_place(object, unit);

	return rest < object->unit_bytes ? rest : object->unit_bytes;
}

/* How many bytes of the source it has. */
static inline uint64_t object_unit_length(const struct cache_object *object, uint64_t unit)
{
	uint64_t rest = object->size - object_place(object, unit);

	return rest < object->unit_bytes ? rest : object->unit_bytes;
}

/*
 * How many bytes `count` units take in the file. `with_last`: the content's last unit is one of
 * them.
 */
static inline uint64_t object_units_bytes(const struct cache_object *object, uint64_t count,
					  bool with_last)
{
	uint64_t bytes = count * object->unit_bytes;

	if (with_last)
		bytes -= object->unit_bytes - object_unit_bytes(object, object->units - 1);
	return bytes;
}

/*
 * bits.c: sets or clears the bits of `count` units, in ascending order. The caller holds the
 * object's lock. Returns the number of bits that changed, or a negative errno.
 */
int64_t object_set_bits(struct cache_object *object, const uint64_t *units, size_t count,
			bool value);
/*
 * Evicts units, in ascending order, possibly with duplicates: their data are removed. `forced`:
 * also the data of units without a bit. Returns the bytes of the cached ones, and adds their number
 * to `*cleared` unless that is NULL; or returns a negative errno. The caller does not hold the
 * object's lock.
 */
int64_t object_evict(struct cache_object *object, const uint64_t *units, size_t count, bool forced,
		     uint64_t *cleared);
/* Evicts all cached units of [first, end), and returns the same. */
int64_t object_empty(struct cache_object *object, uint64_t first, uint64_t end, uint64_t *cleared);
uint64_t object_count_units(const struct cache_object *object);
uint64_t object_count_bytes(const struct cache_object *object);

/* pending.c */
bool pending_has(const struct cache_object *object, uint64_t unit, uint64_t evictions);
/*
 * `units` of the object's group were evicted. The group's other pending units stay readable: they
 * get the new counter. The caller holds the object's lock.
 */
void pending_follow(struct cache_object *object, uint64_t group, uint64_t before,
		    const uint64_t *units, size_t count);
uint64_t cache_pending_bytes(struct cache *cache);
int pending_add(struct cache_object *object, uint64_t unit, uint64_t evictions);
int pending_start(struct cache *cache);
/* Makes durable what is pending. Returns -ETIMEDOUT when that takes too long: its thread goes on. */
int pending_stop(struct cache *cache);

/* frequency.c: how often units are wanted. */
static inline uint64_t unit_hash(const struct cache_object *object, uint64_t unit)
{
	uint64_t hash = (object->seed ^ unit) * 0x9e3779b97f4a7c15u;

	hash ^= hash >> 32;
	hash *= 0xd6e8feb86659fd93u;
	return (hash ^ hash >> 32) | 1;
}
/* Notes that a unit was wanted. Any thread may call this. */
static inline void frequency_note(struct cache *cache, uint64_t hash)
{
	uint64_t *slot = &cache->recent[hash >> 1 & (RECENT_SLOTS - 1)];

	/* Read first, so that threads that read the same unit do not contend for the cache line. */
	if (__atomic_load_n(slot, __ATOMIC_RELAXED) != hash)
		__atomic_store_n(slot, hash, __ATOMIC_RELAXED);
}
/* Adds up what was noted. Returns whether there was anything. */
bool frequency_sweep(struct cache *cache);
unsigned frequency_of(struct cache *cache, uint64_t hash);
/* Reads what other processes have added. */
void frequency_load(struct cache *cache);

/* evict.c */
/* Makes room for `bytes` more, within the limits. Returns 0 or -ENOSPC. May wait for the disk. */
int cache_make_room(struct cache *cache, uint64_t bytes, bool disk_full);
/* Makes some room in advance, on the cache's thread, so that others need not wait for it. */
void cache_keep_room(struct cache *cache);
/* A unit became durable, and may be evicted from now on. */
void probation_add(struct cache_object *object, uint64_t unit);

/*
 * How many bytes can be cached before anything is evicted. `*used` is what is cached or on its way
 * to the disk.
 */
uint64_t cache_capacity(struct cache *cache, uint64_t *used);
/*
 * Returns how many bytes were evicted, none of them in the ranges. The caller holds the directory's
 * lock.
 */
uint64_t evict_others(struct cache *cache, const struct cache_ranges *ranges, uint64_t bytes);

/* room.c: searches sorted ranges; NULL has none. */
bool ranges_contain(const struct cache_ranges *ranges, const struct cache_object *object,
		    uint64_t unit);

/* contents.c: the contents in the directory. The caller holds its lock. */
struct content {
	char name[CACHE_NAME_BYTES];
	uint64_t disk_bytes; /* about what its data take on the disk */
};
int contents_read(struct cache *cache);
void contents_free(struct cache *cache);
/* Finds an open object, or opens one; content_release() closes it in the latter case. */
int content_acquire(struct cache *cache, const struct content *content,
		    struct cache_object **object, struct error *error);
void content_release(struct cache_object *object);
bool content_is_pinned(struct cache *cache, const char *name);
/* Counts all cached units again. */
int cache_recount(struct cache *cache);

/* state.c. Wrong sums are corrected when units are counted again. */
int state_open(struct cache *cache, struct error *error);
int state_lock(struct cache *cache);
void state_unlock(struct cache *cache);
int state_read_number(const struct cache *cache, size_t place, uint64_t *number);
void state_write_number(struct cache *cache, size_t place, uint64_t number);
/* The bytes of all cached units, over all contents. */
uint64_t cache_bytes(const struct cache *cache);
void cache_add_bytes(struct cache *cache, int64_t difference);
