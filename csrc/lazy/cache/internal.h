/* SPDX-License-Identifier: MIT */
/*
 * The parts of the cache among themselves.
 *
 * Locks, in the order in which they are taken: the directory's (cache_lock()), objects_lock, an object's
 * (object_lock()), state_lock(), heat_lock, pending_lock. Readers take none.
 */
#ifndef CACHE_INTERNAL_H
#define CACHE_INTERNAL_H

#include <endian.h>
#include <pthread.h>
#include <sys/types.h>

#include "lazy/cache.h"
#include "lazy/cache/admin.h"
#include "lazy/cache/format.h"

enum {
	CACHE_NAME_BYTES = 2 * SOURCE_KEY_BYTES + 1,
	CACHE_OBJECTS_MAX = 4096, /* open at a time: two descriptors and some pages each */
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
	uint64_t seed; /* of the hashes of its units */
	int data_fd;   /* flock()ed, shared, for as long as it is open */
	int bits_fd;
	const struct cache_group *groups;
	const void *mapped;
	size_t mapped_bytes;
	bool in_memory;
	bool entered; /* its directory entries are durable; the cache's thread only */
	bool failed;  /* its disk does not take data: nothing more is put */
	bool damaged; /* atomic: its files were cut, so that nothing in them is believed */
	bool listed;  /* in cache->objects, until the cache is closed */
	pthread_mutex_t lock;
};

/*
 * Units that are written but not durable: readable in this process. A slot is changed under
 * pending_lock; readers look at `sequence` before and after (odd: it is being changed).
 */
struct pending {
	uint64_t sequence;
	struct cache_object *object; /* NULL: free */
	uint64_t unit;
	uint64_t evictions; /* of its group, before it was written */
	uint64_t fingerprint;
	bool taken; /* by the thread: it is being made durable */
};

/* What was put last, oldest first: evicted before anything else, unless it was wanted again. */
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
	struct cache_options options; /* atomic: as `limits` has them, unless they were given */
	uint64_t default_reserve_bytes;
	ino_t limits_inode; /* which one was read; 0: there was none */
	long limits_mtime_ns;
	char *path;
	int dir_fd;
	int lock_fd;
	int state_fd;
	int limits_error;
	pthread_mutex_t state_lock; /* with a lock of the file */
	pthread_mutex_t heat_lock;
	uint8_t *heat;	      /* CACHE_HEAT_COUNTERS; as they were read last */
	pthread_mutex_t lock; /* with lock_fd */

	pthread_mutex_t objects_lock;
	struct cache_object *objects;
	unsigned object_count;		/* atomic: who asks for statistics waits for no disk */
	bool has_own_limits, in_memory; /* as they were at the start */
	bool stop, running;
	uint64_t mapped_bytes;

	pthread_mutex_t pending_lock;
	pthread_cond_t wake;	/* the thread */
	pthread_cond_t drained; /* slots became free */
	struct pending pending[PENDING_SLOTS];
	unsigned pending_count;
	unsigned waiting;  /* for `drained` */
	uint64_t finished; /* batches */
	uint64_t pending_bytes;
	struct probation probation;
	struct cache_counters counters; /* atomic */
	pthread_t thread;
	struct batch *batch; /* its own */

	uint64_t recent[RECENT_SLOTS]; /* hashes of units wanted since the thread looked last */

	struct content *contents; /* the directory, as it was read last; under its lock */
	size_t content_count, content_room;
	uint64_t contents_read_ns;
	uint64_t recounted_ns;
	uint64_t reserve_evicted_ns;
	uint64_t full_until_ns; /* atomic: nothing could be evicted, so nobody tries again yet */
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

/* limits.c. At open, and by the cache's thread. */
int limits_read(struct cache *cache, struct complaint *complaint);
void limits_refresh(struct cache *cache);

/* lock.c: both kinds are shared by processes and by the threads of each. */
int cache_lock(struct cache *cache);
void cache_unlock(struct cache *cache);
int object_lock(struct cache_object *object);
void object_unlock(struct cache_object *object);

/* object.c. All under the directory's lock. */
struct content_shape {
	uint64_t size;
	uint32_t unit_bytes;
};
/* `shape` NULL: as the file says; then it must exist (-ENOENT). */
int object_open(struct cache *cache, const uint8_t key[static SOURCE_KEY_BYTES],
		const struct content_shape *shape, struct cache_object **object,
		struct complaint *complaint);
void object_close(struct cache_object *object);
/* Remove the files of a content. -EBUSY: somebody has it open. */
int content_remove(struct cache *cache, const char *name);
/* KEY in hexadecimal digits; false: `text` does not begin with one. */
bool cache_key_parse(const char *text, uint8_t key[static SOURCE_KEY_BYTES]);
void cache_key_format(const uint8_t key[static SOURCE_KEY_BYTES],
		      char name[static CACHE_NAME_BYTES]);

/* whole.c: whether others have cut its files. Says so once, and it is damaged then. */
bool object_is_whole(struct cache_object *object);
/* When it is opened: what its bits vouch for, and is a hole, is dropped. Returns 0 or a negative errno. */
int object_check_data(struct cache_object *object);

/* guard.c: `*damaged` is set where SIGBUS would come, and zeroes are read there from then on. */
void guard_add(const void *mapped, size_t bytes, bool *damaged);
void guard_remove(const void *mapped);

/* files.c: headers, and files that are made or refused. Under the directory's lock. */
struct content_files {
	int data_fd, bits_fd;
	struct cache_header header;
};
int content_files_open(struct cache *cache, const char *name,
		       const uint8_t key[static SOURCE_KEY_BYTES],
		       const struct content_shape *shape, struct content_files *files,
		       struct complaint *complaint);

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

/* Bytes that unit `unit` takes in the file. */
static inline uint64_t object_unit_bytes(const struct cache_object *object, uint64_t unit)
{
	uint64_t rest = cache_data_bytes(object->size) - unit * object->unit_bytes;

	return rest < object->unit_bytes ? rest : object->unit_bytes;
}

/*
 * bits.c: set or clear the bits of `count` units, which are in ascending order. The object is
 * locked. Returns the number of bits that were changed, or a negative errno.
 */
int64_t object_set_bits(struct cache_object *object, const uint64_t *units, size_t count,
			bool value);
/*
 * Take units out, in ascending order, one of them perhaps more than once: their data vanish. `forced`:
 * also the data of those that are not there. Returns the bytes of those that were there, whose number
 * is added to `*cleared` where that is not NULL, or a negative errno. The object is not locked yet.
 */
int64_t object_evict(struct cache_object *object, const uint64_t *units, size_t count, bool forced,
		     uint64_t *cleared);
uint64_t object_count_units(const struct cache_object *object);
uint64_t object_count_bytes(const struct cache_object *object);

/* pending.c */
bool pending_has(const struct cache_object *object, uint64_t unit, uint64_t evictions);
/* The object's group was evicted from, without these units: the others stay readable. Locked. */
void pending_follow(struct cache_object *object, uint64_t group, uint64_t before,
		    const uint64_t *units, size_t count);
uint64_t unit_fingerprint(const uint8_t *data, uint32_t length);
uint64_t cache_pending_bytes(struct cache *cache);
int pending_add(struct cache_object *object, uint64_t unit, uint64_t evictions,
		uint64_t fingerprint);
int pending_start(struct cache *cache);
void pending_stop(struct cache *cache);

/* heat.c: how often units are wanted. */
static inline uint64_t unit_hash(const struct cache_object *object, uint64_t unit)
{
	uint64_t hash = (object->seed ^ unit) * 0x9e3779b97f4a7c15u;

	hash ^= hash >> 32;
	hash *= 0xd6e8feb86659fd93u;
	return (hash ^ hash >> 32) | 1;
}
/* Any thread. */
static inline void heat_note(struct cache *cache, uint64_t hash)
{
	uint64_t *slot = &cache->recent[hash >> 1 & (RECENT_SLOTS - 1)];

	/* Read first: threads that read the same unit do not fight for the line. */
	if (__atomic_load_n(slot, __ATOMIC_RELAXED) != hash)
		__atomic_store_n(slot, hash, __ATOMIC_RELAXED);
}
/* Add up what was noted; returns whether there was anything. */
bool heat_sweep(struct cache *cache);
unsigned heat_of(struct cache *cache, uint64_t hash);
/* What other processes have added, too. */
void heat_load(struct cache *cache);

/* evict.c */
/* Room for `bytes` more, within the limits. Returns 0 or -ENOSPC. May wait for the disk. */
int cache_make_room(struct cache *cache, uint64_t bytes, bool disk_full);
/* The cache's thread: some room in advance, so that nobody has to wait for it. */
void cache_keep_room(struct cache *cache);
/* A unit became durable: from now on it may be evicted. */
void probation_add(struct cache_object *object, uint64_t unit);

/* contents.c: what lies in the directory. Under its lock. */
struct content {
	char name[CACHE_NAME_BYTES];
	uint64_t disk_bytes; /* about what its data take */
};
int contents_read(struct cache *cache);
void contents_free(struct cache *cache);
/* Open here, or opened for a moment: content_release() closes the latter. */
int content_acquire(struct cache *cache, const struct content *content,
		    struct cache_object **object, struct complaint *complaint);
void content_release(struct cache_object *object);
bool content_is_pinned(struct cache *cache, const char *name);
/* Count anew what is there. */
int cache_recount(struct cache *cache);

uint64_t cache_now_ns(void);

/* state.c. What is wrong there is put right when things are counted anew. */
int state_open(struct cache *cache, struct complaint *complaint);
int state_lock(struct cache *cache);
void state_unlock(struct cache *cache);
int state_read_number(const struct cache *cache, size_t place, uint64_t *number);
void state_write_number(struct cache *cache, size_t place, uint64_t number);
/* Of units that are there, in all contents. */
uint64_t cache_bytes(const struct cache *cache);
void cache_add_bytes(struct cache *cache, int64_t difference);

#endif
