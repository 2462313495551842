/* SPDX-License-Identifier: MIT */
/*
 * Sets and clears the bits of units. Bits are changed under the object's lock, by write calls; the
 * mapping is for readers. Each bit lies in one byte, so even a torn write leaves each bit either
 * old or new.
 */
#include <errno.h>
#include <fcntl.h>
#include <linux/falloc.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/fileio.h"
#include "content/cache/internal.h"

enum { EVICT_AT_ONCE = 256 };

static uint64_t group_offset(uint64_t group)
{
	return CACHE_HEADER_BYTES + group * sizeof(struct cache_group);
}

static int write_bits(struct cache_object *object, const void *data, size_t bytes, uint64_t offset)
{
	/* The bytes that were read may be zeroes from guard.c. */
	return object_is_damaged(object) ? -EIO : pwrite_full(object->bits_fd, data, bytes, offset);
}

/* Returns how many of units[] lie in the group of the first one. */
static size_t same_group(const uint64_t *units, size_t count)
{
	size_t same = 1;

	while (same < count && units[same] / CACHE_GROUP_UNITS == units[0] / CACHE_GROUP_UNITS)
		same++;
	return same;
}

static int64_t change_group(struct cache_object *object, const uint64_t *units, size_t count,
			    bool value)
{
	uint64_t index = units[0] / CACHE_GROUP_UNITS;
	const struct cache_group *group = &object->groups[index];
	uint64_t words[CACHE_GROUP_WORDS];
	int64_t changed = 0;
	int err;

	for (unsigned i = 0; i < CACHE_GROUP_WORDS; i++)
		words[i] = le64toh(group->bits[i]);
	for (size_t i = 0; i < count; i++) {
		unsigned bit = units[i] % CACHE_GROUP_UNITS;
		uint64_t mask = (uint64_t)1 << bit % 64;

		if (!(words[bit / 64] & mask) == !value)
			continue;
		words[bit / 64] ^= mask;
		changed++;
	}
	if (!changed)
		return 0;
	for (unsigned i = 0; i < CACHE_GROUP_WORDS; i++)
		words[i] = htole64(words[i]);
	err = write_bits(object, words, sizeof(words),
			 group_offset(index) + offsetof(struct cache_group, bits));
	return err ?: changed;
}

int64_t object_set_bits(struct cache_object *object, const uint64_t *units, size_t count,
			bool value)
{
	int64_t changed = 0;

	for (size_t i = 0; i < count;) {
		size_t same = same_group(units + i, count - i);
		int64_t result = change_group(object, units + i, same, value);

		if (result < 0)
			return result;
		changed += result;
		i += same;
	}
	return changed;
}

static int count_evictions(struct cache_object *object, const uint64_t *units, size_t count)
{
	for (size_t i = 0; i < count;) {
		size_t same = same_group(units + i, count - i);
		uint64_t before = object_evictions(object, units[i]);
		uint64_t after = htole64(before + 1);
		uint64_t group = units[i] / CACHE_GROUP_UNITS;
		int err = write_bits(object, &after, sizeof(after), group_offset(group));

		if (err)
			return err;
		pending_follow(object, group, before, units + i, same);
		i += same;
	}
	return 0;
}

static int punch(struct cache_object *object, const uint64_t *units, size_t count)
{
	struct stat before;
	bool known = !fstat(object->data_fd, &before);

	for (size_t i = 0; i < count;) {
		uint64_t at = object_place(object, units[i]);
		uint64_t end = at + object_unit_bytes(object, units[i]);

		/* Punch neighbouring units in one call. */
		while (++i < count && units[i] == units[i - 1] + 1)
			end = object_place(object, units[i]) + object_unit_bytes(object, units[i]);
		if (fallocate(object->data_fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
			      (off_t)at, (off_t)(end - at)))
			return -errno;
	}
	/*
	 * Restore the times, because evicting is no use of the content: `btrfs-ublk cache prune
	 * --older-than` goes by them.
	 */
	if (known)
		futimens(object->data_fd,
			 (struct timespec[]){ { .tv_nsec = UTIME_OMIT }, before.st_mtim });
	return 0;
}

static int64_t evict_locked(struct cache_object *object, const uint64_t *units, size_t count,
			    uint64_t *cleared)
{
	int64_t bytes = 0, changed;
	int err;

	for (size_t i = 0; i < count; i++) {
		if (object_has(object, units[i]))
			bytes += (int64_t)object_unit_bytes(object, units[i]);
	}
	/*
	 * A killed process may stop after any of these steps. A reader that has seen a bit sees the
	 * counter change before the data do. After a loss of power, the data of all bits that
	 * reached the disk are there.
	 */
	changed = object_set_bits(object, units, count, false);
	if (changed < 0)
		return changed;
	*cleared += (uint64_t)changed;
	err = count_evictions(object, units, count);
	cache_add_bytes(object->cache, -bytes);
	if (!err && fdatasync(object->bits_fd))
		err = -errno;
	if (!err)
		err = punch(object, units, count);
	return err ?: bytes;
}

int64_t object_evict(struct cache_object *object, const uint64_t *units, size_t count, bool forced,
		     uint64_t *cleared)
{
	uint64_t there[EVICT_AT_ONCE], uncounted = 0;
	int64_t bytes = 0, result = object_lock(object);

	if (result)
		return result;
	for (size_t i = 0; i < count && result >= 0;) {
		size_t found = 0;

		for (; i < count && found < EVICT_AT_ONCE; i++) {
			/* The choice of victims may find a unit twice; count its bytes once. */
			if (found && there[found - 1] == units[i])
				continue;
			if (forced || object_has(object, units[i]))
				there[found++] = units[i];
		}
		result = found ? evict_locked(object, there, found, cleared ?: &uncounted) : 0;
		bytes += result > 0 ? result : 0;
	}
	object_unlock(object);
	return result < 0 ? result : bytes;
}

int64_t object_empty(struct cache_object *object, uint64_t first, uint64_t end, uint64_t *cleared)
{
	uint64_t units[EVICT_AT_ONCE];
	int64_t bytes = 0;

	while (first < end) {
		size_t count = 0;
		int64_t evicted;

		for (; first < end && count < EVICT_AT_ONCE; first++) {
			if (object_has(object, first))
				units[count++] = first;
		}
		evicted = count ? object_evict(object, units, count, false, cleared) : 0;
		if (evicted < 0)
			return evicted;
		bytes += evicted;
	}
	return bytes;
}

static uint64_t count_groups(const struct cache_object *object, uint64_t first, uint64_t end)
{
	uint64_t count = 0;

	for (uint64_t group = first; group < end; group++) {
		for (unsigned i = 0; i < CACHE_GROUP_WORDS; i++)
			count += (unsigned)__builtin_popcountll(object->groups[group].bits[i]);
	}
	return count;
}

/* Skip holes of the file: reading those of a large content would allocate memory. */
uint64_t object_count_units(const struct cache_object *object)
{
	uint64_t groups = cache_group_count(object->units), next = 0, count = 0;
	off_t at = CACHE_HEADER_BYTES;

	while (next < groups) {
		off_t data = lseek(object->bits_fd, at, SEEK_DATA);
		uint64_t end = groups;

		if (data < 0 && errno == ENXIO)
			break;
		/* Where holes cannot be found, read all the rest. */
		at = data < 0 ? -1 : lseek(object->bits_fd, data, SEEK_HOLE);
		if (at >= 0) {
			uint64_t first =
				((uint64_t)data - CACHE_HEADER_BYTES) / sizeof(struct cache_group);

			end = ((uint64_t)at - CACHE_HEADER_BYTES + sizeof(struct cache_group) - 1) /
			      sizeof(struct cache_group);
			next = first > next ? first : next;
			end = end < groups ? end : groups;
		}
		count += count_groups(object, next, end);
		next = end > next ? end : next;
	}
	return count;
}

uint64_t object_count_bytes(const struct cache_object *object)
{
	uint64_t units = object_count_units(object);

	return object_units_bytes(object, units, units && object_has(object, object->units - 1));
}
