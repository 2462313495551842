/* SPDX-License-Identifier: MIT */
/*
 * Locks that end with the process: flock(2) between processes, on descriptors that each process
 * opens once, and a mutex between its threads.
 */
#include <errno.h>
#include <sys/file.h>

#include "lazy/cache/internal.h"

static int lock_both(pthread_mutex_t *mutex, int fd)
{
	pthread_mutex_lock(mutex);
	while (flock(fd, LOCK_EX)) {
		int err = -errno;

		if (err != -EINTR) {
			pthread_mutex_unlock(mutex);
			return err;
		}
	}
	return 0;
}

static void unlock_both(pthread_mutex_t *mutex, int fd)
{
	flock(fd, LOCK_UN);
	pthread_mutex_unlock(mutex);
}

int cache_lock(struct cache *cache)
{
	return lock_both(&cache->lock, cache->lock_fd);
}

void cache_unlock(struct cache *cache)
{
	unlock_both(&cache->lock, cache->lock_fd);
}

int object_lock(struct cache_object *object)
{
	return lock_both(&object->lock, object->bits_fd);
}

void object_unlock(struct cache_object *object)
{
	unlock_both(&object->lock, object->bits_fd);
}
