/* SPDX-License-Identifier: MIT */
/* A content of the cache: opens it, looks units up, and puts them in. */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

#include "base/fileio.h"
#include "base/hex.h"
#include "base/message.h"
#include "content/cache/internal.h"

enum {
	CHECK_BYTES = 16 << 10,
	/* Bits up to this size are locked in memory; of larger ones, the kernel decides. */
	LOCKED_BITS_BYTES = 16 << 20,
};

bool cache_key_parse(const char *text, uint8_t key[static SOURCE_KEY_BYTES])
{
	return hex_decode(text, key, SOURCE_KEY_BYTES);
}

/* Finds pages that cannot be read: in a mapping, they would raise SIGBUS. */
static int read_through(int fd, uint64_t bytes)
{
	uint8_t buffer[CHECK_BYTES];

	for (uint64_t at = 0; at < bytes; at += sizeof(buffer)) {
		uint64_t length = bytes - at < sizeof(buffer) ? bytes - at : sizeof(buffer);
		int err = pread_full(fd, buffer, length, at);

		if (err)
			return err;
	}
	return 0;
}

/* Maps the bits, and locks them in memory unless there are too many. */
static int map_bits(struct cache_object *object)
{
	uint64_t bytes =
		CACHE_HEADER_BYTES + cache_group_count(object->units) * sizeof(struct cache_group);
	bool locked = object->cache->mapped_bytes + bytes <= LOCKED_BITS_BYTES;
	void *mapped;
	int err = read_through(object->bits_fd, bytes);

	if (err)
		return err;
	mapped = mmap(NULL, bytes, PROT_READ, MAP_SHARED, object->bits_fd, 0);
	if (mapped == MAP_FAILED)
		return -errno;
	/* A page that cannot be read in now is left to the read that needs it, and to guard.c. */
	if (locked)
		madvise(mapped, bytes, MADV_POPULATE_READ);
	if (!locked && munlock(mapped, bytes)) {
		err = -errno;
		munmap(mapped, bytes);
		return err;
	}
	err = guard_add(mapped, bytes, &object->damaged);
	if (err) {
		munmap(mapped, bytes);
		return err;
	}
	object->mapped = mapped;
	object->mapped_bytes = bytes;
	object->groups = (const struct cache_group *)((const uint8_t *)mapped + CACHE_HEADER_BYTES);
	object->cache->mapped_bytes += bytes;
	return 0;
}

int object_open(struct cache *cache, const uint8_t key[static SOURCE_KEY_BYTES],
		const struct content_shape *shape, struct cache_object **object,
		struct error *error)
{
	struct content_files files = { .data_fd = -1, .bits_fd = -1 };
	struct cache_object *made;
	char name[CACHE_NAME_BYTES];
	int err;

	hex_encode(key, SOURCE_KEY_BYTES, name);
	err = content_files_open(cache, name, key, shape, &files, error);
	if (err)
		return err;
	made = calloc(1, sizeof(*made));
	if (!made) {
		close(files.data_fd);
		close(files.bits_fd);
		return error_set(error, -ENOMEM, "no memory for a content of the cache");
	}
	made->cache = cache;
	made->header = files.header;
	memcpy(made->name, name, sizeof(made->name));
	made->size = le64toh(files.header.size);
	made->unit_bytes = le32toh(files.header.unit_bytes);
	made->units = (made->size - 1) / made->unit_bytes + 1;
	memcpy(&made->seed, key, sizeof(made->seed));
	made->data_fd = files.data_fd;
	made->bits_fd = files.bits_fd;
	made->in_memory = cache->in_memory;
	pthread_mutex_init(&made->lock, NULL);
	err = map_bits(made);
	if (!err)
		err = sums_map(made);
	if (err) {
		object_close(made);
		return error_set(error, err, "cannot map the files of %s in the cache '%s': %s",
				 name, cache->path, strerror(-err));
	}
	*object = made;
	return 0;
}

void object_close(struct cache_object *object)
{
	if (object->mapped) {
		guard_remove(object->mapped);
		munmap((void *)object->mapped, object->mapped_bytes);
		object->cache->mapped_bytes -= object->mapped_bytes;
	}
	sums_unmap(object);
	close(object->data_fd);
	close(object->bits_fd);
	pthread_mutex_destroy(&object->lock);
	free(object);
}

static struct cache_object *find_object(struct cache *cache, const struct source *source)
{
	for (struct cache_object *object = cache->objects; object; object = object->next) {
		if (!memcmp(object->header.key, source->key, SOURCE_KEY_BYTES))
			return object;
	}
	return NULL;
}

static int open_source(struct cache *cache, const struct source *source,
		       struct cache_object **object, struct error *error)
{
	const struct content_shape shape = { source->size, source->unit_bytes };
	int err;

	*object = find_object(cache, source);
	if (*object &&
	    ((*object)->size != source->size || (*object)->unit_bytes != source->unit_bytes))
		return error_set(error, -EUCLEAN,
				 "two sources have the key %s, but different sizes or units",
				 (*object)->name);
	if (*object)
		return 0;
	if (!source->size || source->size > INT64_MAX / 2)
		return error_set(error, -EFBIG, "no file can hold %llu bytes",
				 (unsigned long long)source->size);
	if (cache->object_count >= CACHE_OBJECTS_MAX)
		return error_set(error, -EMFILE,
				 "the cache has %d contents open, which is the limit",
				 CACHE_OBJECTS_MAX);
	err = object_open(cache, source->key, &shape, object, error);
	if (err)
		return err;
	err = object_check_data(*object);
	if (err) {
		error_set_text(error, "cannot examine %s.data in the cache '%s': %s",
			       (*object)->name, cache->path, strerror(-err));
		object_close(*object);
		return err;
	}
	(*object)->listed = true;
	(*object)->next = cache->objects;
	cache->objects = *object;
	__atomic_store_n(&cache->object_count, cache->object_count + 1, __ATOMIC_RELAXED);
	return 0;
}

int cache_object_open(struct cache *cache, struct source *source, struct cache_object **object)
{
	struct error error = {};
	int err;

	*object = cache_object_of(source);
	if (*object)
		return 0;
	err = cache_lock(cache);
	if (err)
		return err;
	pthread_mutex_lock(&cache->objects_lock);
	err = open_source(cache, source, object, &error);
	if (!err)
		__atomic_store_n(&source->cached, *object, __ATOMIC_RELEASE);
	pthread_mutex_unlock(&cache->objects_lock);
	cache_unlock(cache);
	if (err) {
		cache_count(&cache->counters.failed, 1);
		msg_warning("a source is served uncached: %s", error.text);
	}
	return err;
}

struct cache_object *cache_object_of(const struct source *source)
{
	return __atomic_load_n(&source->cached, __ATOMIC_ACQUIRE);
}

static uint64_t evictions_of(const struct cache_object *object, uint64_t first, uint64_t last)
{
	uint64_t sum = 0;

	/* Counters only grow, so the sum is unchanged only if all are. */
	for (uint64_t group = first / CACHE_GROUP_UNITS; group <= last / CACHE_GROUP_UNITS; group++)
		sum += object_evictions(object, group * CACHE_GROUP_UNITS);
	return sum;
}

static bool look_at(const struct cache_object *object, uint64_t first, uint64_t last,
		    struct cache_lookup *lookup)
{
	if (first > last || last >= object->units || object_is_damaged(object))
		return false;
	/* NB: read the counters before the bits; an eviction writes them in the opposite order. */
	lookup->first = first;
	lookup->last = last;
	lookup->evictions = evictions_of(object, first, last);
	for (uint64_t unit = first; unit <= last; unit++) {
		uint64_t evictions = object_evictions(object, unit);

		if (!object_has(object, unit) && !pending_has(object, unit, evictions))
			return false;
	}
	return true;
}

bool cache_lookup(const struct cache_object *object, uint64_t first, uint64_t last,
		  struct cache_lookup *lookup)
{
	if (!look_at(object, first, last, lookup))
		return false;
	for (uint64_t unit = first; unit <= last; unit++)
		frequency_note(object->cache, unit_hash(object, unit));
	return true;
}

bool cache_has(const struct cache_object *object, uint64_t first, uint64_t last)
{
	struct cache_lookup lookup;

	return look_at(object, first, last, &lookup);
}

bool cache_has_unit(const struct source *source, uint64_t unit)
{
	const struct cache_object *object = cache_object_of(source);

	return object && cache_has(object, unit, unit);
}

int cache_fd(const struct cache_object *object)
{
	return object->data_fd;
}

bool cache_is_in_memory(const struct cache_object *object)
{
	return object->in_memory;
}

bool cache_lookup_is_valid(const struct cache_object *object, const struct cache_lookup *lookup)
{
	/* Order the read before this second look. */
	__atomic_thread_fence(__ATOMIC_ACQUIRE);
	return evictions_of(object, lookup->first, lookup->last) == lookup->evictions &&
	       !object_is_damaged(object);
}

/*
 * Gets the counter of the unit's group before the unit is written. Returns 1 when the unit is
 * cached already.
 */
static int begin_put(struct cache_object *object, uint64_t unit, uint64_t *evictions)
{
	int err = object_lock(object);

	if (err)
		return err;
	/*
	 * Take the lock: an eviction in progress may have cleared the bits, and not yet removed the
	 * data.
	 */
	*evictions = object_evictions(object, unit);
	err = object_has(object, unit);
	object_unlock(object);
	return err;
}

static int write_with_sums(const struct cache_object *object, uint64_t unit, const uint8_t *data,
			   uint32_t length)
{
	int err = pwrite_full(object->data_fd, data, length, object_place(object, unit));

	return err ?: sums_write(object, unit, data, length);
}

static int write_unit(struct cache_object *object, uint64_t unit, const uint8_t *data,
		      uint32_t length)
{
	struct cache *cache = object->cache;
	int err = write_with_sums(object, unit, data, length);

	if (err != -ENOSPC && err != -EDQUOT)
		return err;
	err = cache_make_room(cache, length, true);
	if (!err)
		err = write_with_sums(object, unit, data, length);
	if (!err)
		return 0;
	/* The part that was written takes space that no bit accounts for. */
	object_evict(object, &unit, 1, true, NULL);
	return -ENOSPC;
}

int cache_put(struct cache_object *object, uint64_t unit, const uint8_t *data, uint32_t length)
{
	struct cache *cache = object->cache;
	uint64_t evictions = 0;
	int err;

	if (unit >= object->units)
		return -EINVAL;
	if (length != object_unit_length(object, unit))
		return -EINVAL;
	if (__atomic_load_n(&object->failed, __ATOMIC_RELAXED) || object_is_damaged(object))
		return -EIO;
	if (object_has(object, unit))
		return 0;
	err = cache_make_room(cache, object_unit_bytes(object, unit), false);
	if (!err)
		err = begin_put(object, unit, &evictions);
	if (err > 0)
		return 0;
	/* Writing behind the end of a truncated file would turn what is missing into a hole. */
	if (!err && !object_is_whole(object))
		err = -EIO;
	if (!err)
		err = write_unit(object, unit, data, length);
	if (!err && !object_is_whole(object))
		err = -EIO;
	if (!err)
		err = pending_add(object, unit, evictions);
	if (err) {
		cache_count(err == -ENOSPC ? &cache->counters.no_room : &cache->counters.failed, 1);
		return err;
	}
	frequency_note(cache, unit_hash(object, unit));
	cache_count(&cache->counters.put_units, 1);
	cache_count(&cache->counters.put_bytes, length);
	return 0;
}

int cache_drop(struct cache_object *object, uint64_t unit)
{
	int64_t dropped;

	if (unit >= object->units)
		return -EINVAL;
	dropped = object_evict(object, &unit, 1, true, NULL);
	if (dropped < 0)
		return (int)dropped;
	cache_count(&object->cache->counters.dropped_units, 1);
	return 0;
}
