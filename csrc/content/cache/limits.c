/* SPDX-License-Identifier: MIT */
/*
 * The file `limits` of a cache, which applies to all servers that have it open. It is JSON and
 * replaced as a whole; each server reads it again every few seconds.
 */
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

#include "base/cleanup.h"
#include "base/message.h"
#include "content/cache/internal.h"

static int load(int fd, uint64_t *max_bytes, uint64_t *reserve_bytes)
{
	json_t *limits = json_loadfd(fd, 0, NULL);
	json_int_t version, max, reserve;
	int err = 0;

	if (json_unpack(limits, "{s:I, s:I, s:I !}", "version", &version, "max_bytes", &max,
			"reserve_bytes", &reserve) ||
	    version != CACHE_STATE_VERSION || max < 0 || reserve < 0)
		err = -EUCLEAN;
	json_decref(limits);
	if (err)
		return err;
	*max_bytes = (uint64_t)max;
	*reserve_bytes = (uint64_t)reserve;
	return 0;
}

static int open_limits(const struct cache *cache)
{
	return openat(cache->dir_fd, "limits", O_RDONLY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK);
}

int limits_read(struct cache *cache, struct error *error)
{
	_cleanup_close_ int fd = -1;
	uint64_t max_bytes = 0, reserve_bytes = 0;
	int err;

	/* The caller of cache_open() has given limits. */
	if (cache->has_own_limits)
		return 0;
	fd = open_limits(cache);
	if (fd < 0 && errno == ENOENT) {
		err = 0;
	} else if (fd < 0) {
		err = -errno;
	} else {
		err = load(fd, &max_bytes, &reserve_bytes);
	}
	if (err) {
		error_set_hint(error, "set them again: btrfs-ublk cache limit");
		return error_set(error, err, "cannot read the limits of the cache '%s': %s",
				 cache->path,
				 err == -EUCLEAN ? "they are not valid" : strerror(-err));
	}
	if (!reserve_bytes)
		reserve_bytes = cache->default_reserve_bytes;
	__atomic_store_n(&cache->options.max_bytes, max_bytes, __ATOMIC_RELAXED);
	__atomic_store_n(&cache->options.reserve_bytes, reserve_bytes, __ATOMIC_RELAXED);
	return 0;
}

void limits_refresh(struct cache *cache)
{
	struct error error = {};
	int err = limits_read(cache, &error);

	/* Warn once, not every few seconds. */
	if (err && err != cache->limits_error)
		msg_warning("%s; the previous limits stay in force", error.text);
	cache->limits_error = err;
}

uint64_t limits_reserve(const struct cache *cache)
{
	_cleanup_close_ int fd = open_limits(cache);
	uint64_t max_bytes, reserve_bytes = 0;

	return fd < 0 || load(fd, &max_bytes, &reserve_bytes) ? 0 : reserve_bytes;
}

int limits_write(struct cache *cache, uint64_t max_bytes, uint64_t reserve_bytes,
		 struct error *error)
{
	_cleanup_close_ int fd = -1;
	json_t *limits;
	int err = 0;

	limits = json_pack("{s:i, s:I, s:I}", "version", CACHE_STATE_VERSION, "max_bytes",
			   (json_int_t)max_bytes, "reserve_bytes", (json_int_t)reserve_bytes);
	fd = openat(cache->dir_fd, "limits.new",
		    O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW | O_CLOEXEC, 0600);
	if (fd < 0 || json_dumpfd(limits, fd, 0) || fsync(fd) ||
	    renameat(cache->dir_fd, "limits.new", cache->dir_fd, "limits") || fsync(cache->dir_fd))
		err = errno ? -errno : -EIO;
	json_decref(limits);
	return err ? error_set(error, err, "cannot write the limits of the cache '%s': %s",
			       cache->path, strerror(-err)) :
		     0;
}
