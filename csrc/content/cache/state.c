/* SPDX-License-Identifier: MIT */
/*
 * The file `state`: what all processes that have a cache open share. It is read and written by
 * system calls under a lock of its own, because a write to a mapping would raise SIGBUS when the
 * disk is full.
 */
#include <errno.h>
#include <fcntl.h>
#include <linux/falloc.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <unistd.h>

#include "base/fileio.h"
#include "content/cache/internal.h"

enum { STATE_BYTES = sizeof(struct cache_state) + CACHE_FREQUENCY_COUNTERS };

/* NB: this lock is independent of flock(2), which tells whether others have the cache open. */
static int lock_file(struct cache *cache, short type)
{
	struct flock lock = { .l_type = type, .l_whence = SEEK_SET, .l_len = 1 };

	while (fcntl(cache->state_fd, F_OFD_SETLKW, &lock)) {
		if (errno != EINTR)
			return -errno;
	}
	return 0;
}

int state_lock(struct cache *cache)
{
	int err;

	pthread_mutex_lock(&cache->state_lock);
	err = lock_file(cache, F_WRLCK);
	if (err)
		pthread_mutex_unlock(&cache->state_lock);
	return err;
}

void state_unlock(struct cache *cache)
{
	lock_file(cache, F_UNLCK);
	pthread_mutex_unlock(&cache->state_lock);
}

int state_read_number(const struct cache *cache, size_t place, uint64_t *number)
{
	uint64_t raw = 0;
	int err = pread_full(cache->state_fd, &raw, sizeof(raw), place);

	*number = le64toh(raw);
	return err;
}

void state_write_number(struct cache *cache, size_t place, uint64_t number)
{
	uint64_t raw = htole64(number);

	/* NB: errors are ignored. Counting again corrects what is lost. */
	pwrite_full(cache->state_fd, &raw, sizeof(raw), place);
}

uint64_t cache_bytes(const struct cache *cache)
{
	uint64_t bytes = 0;

	/* It may be wrong after a process was killed, until units are counted again. */
	if (state_read_number(cache, offsetof(struct cache_state, bytes), &bytes) ||
	    (int64_t)bytes < 0)
		return 0;
	return bytes;
}

void cache_add_bytes(struct cache *cache, int64_t difference)
{
	const size_t place = offsetof(struct cache_state, bytes);
	uint64_t bytes;

	if (!difference || state_lock(cache))
		return;
	if (!state_read_number(cache, place, &bytes))
		state_write_number(cache, place, bytes + (uint64_t)difference);
	state_unlock(cache);
}

/* Also finds out whether the file system supports punching holes. */
static int make_room(struct cache *cache, struct error *error)
{
	int err = 0;

	if (ftruncate(cache->state_fd, STATE_BYTES))
		return error_set(error, -errno, "cannot write '%s/state': %s", cache->path,
				 strerror(errno));
	if (fallocate(cache->state_fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, STATE_BYTES,
		      BLOCK_BYTES)) {
		err = -errno;
		error_set_text(error, "the file system of '%s' cannot punch holes: %s", cache->path,
			       strerror(-err));
		error_set_hint(error, "use a local one: ext4, XFS, btrfs, tmpfs");
	}
	return err;
}

static int begin(struct cache *cache, struct error *error)
{
	struct cache_state start = { .version = htole32(CACHE_STATE_VERSION) };
	int err;

	memcpy(start.magic, CACHE_MAGIC, sizeof(CACHE_MAGIC));
	err = pwrite_full(cache->state_fd, &start, sizeof(start), 0);
	if (err)
		return error_set(error, err, "cannot write '%s/state': %s", cache->path,
				 strerror(-err));
	err = cache_recount(cache);
	return err ? error_set(error, err, "cannot read the cache '%s': %s", cache->path,
			       strerror(-err)) :
		     0;
}

static int check(const struct cache *cache, struct error *error)
{
	struct cache_state found;

	if (!pread_full(cache->state_fd, &found, sizeof(found), 0) &&
	    !memcmp(found.magic, CACHE_MAGIC, sizeof(CACHE_MAGIC)) &&
	    le32toh(found.version) == CACHE_STATE_VERSION)
		return 0;
	error_set_hint(error, "name another directory");
	return error_set(error, -EPROTONOSUPPORT,
			 "the cache '%s' is in use by a program of another version", cache->path);
}

int state_open(struct cache *cache, struct error *error)
{
	/* A process that is alone counts, because one that was killed may have left a wrong sum. */
	bool alone = !flock(cache->state_fd, LOCK_EX | LOCK_NB);
	int err;

	if (!alone && flock(cache->state_fd, LOCK_SH | LOCK_NB))
		return error_set(error, -errno, "cannot lock '%s/state': %s", cache->path,
				 strerror(errno));
	if (!cache->frequency)
		cache->frequency = calloc(1, CACHE_FREQUENCY_COUNTERS);
	if (!cache->frequency)
		return error_set(error, -ENOMEM, "no memory for a cache");
	err = make_room(cache, error);
	if (!err)
		err = alone ? begin(cache, error) : check(cache, error);
	/* No other process can take the lock in between, because the directory is locked. */
	if (!err && alone && flock(cache->state_fd, LOCK_SH))
		err = error_set(error, -errno, "cannot lock '%s/state': %s", cache->path,
				strerror(errno));
	if (err)
		flock(cache->state_fd, LOCK_UN);
	return err;
}
