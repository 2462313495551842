/* SPDX-License-Identifier: MIT */
/*
 * Checks whether the files of a content still have the data that its bits say. A repair of the file
 * system, an incomplete copy or an administrator may have truncated them, and holes would be read
 * as zeroes.
 */
#include <errno.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/message.h"
#include "content/cache/internal.h"

enum { STAT_BLOCK_BYTES = 512 };

static bool has_size(int fd, uint64_t bytes)
{
	struct stat status;

	return !fstat(fd, &status) && (uint64_t)status.st_size == bytes;
}

bool object_is_whole(struct cache_object *object)
{
	const struct cache *cache = object->cache;

	if (object_is_damaged(object))
		return false;
	/*
	 * The last checksum is written with the last unit only, so a truncated file is hardly ever
	 * extended to this length again.
	 */
	if (has_size(object->data_fd, cache_file_bytes(object->size)) &&
	    has_size(object->bits_fd, object->mapped_bytes))
		return true;
	if (!__atomic_exchange_n(&object->damaged, true, __ATOMIC_RELAXED))
		msg_warning(
			"a file of %s in the cache '%s' was truncated: nothing of it is used any "
			"more, and it is made anew when it is opened again",
			object->name, cache->path);
	return false;
}

/* Returns how many units were dropped, or a negative errno. */
static int64_t drop_holes(struct cache_object *object)
{
	off_t end = (off_t)cache_data_bytes(object->size), at = 0;
	uint64_t dropped = 0;
	int64_t result = 0;

	while (at < end && result >= 0) {
		off_t hole = lseek(object->data_fd, at, SEEK_HOLE);

		if (hole < 0)
			return -errno;
		if (hole >= end)
			break;
		at = lseek(object->data_fd, hole, SEEK_DATA);
		if (at < 0 && errno != ENXIO)
			return -errno;
		if (at < 0 || at > end)
			at = end;
		result = object_empty(object, object_unit_at(object, (uint64_t)hole),
				      object_unit_at(object, (uint64_t)(at - 1)) + 1, &dropped);
	}
	return result < 0 ? result : (int64_t)dropped;
}

int object_check_data(struct cache_object *object)
{
	struct stat status;
	int64_t dropped;

	/*
	 * NB: do this before the bits are counted; an eviction changes them in the opposite order.
	 */
	if (fstat(object->data_fd, &status))
		return -errno;
	if ((uint64_t)status.st_blocks * STAT_BLOCK_BYTES >= object_count_bytes(object))
		return 0;
	dropped = drop_holes(object);
	if (dropped > 0)
		msg_warning("%lld units of %s in the cache '%s' have lost their data, and are not "
			    "believed any more",
			    (long long)dropped, object->name, object->cache->path);
	return dropped < 0 ? (int)dropped : 0;
}
