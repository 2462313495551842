/* SPDX-License-Identifier: MIT */
/*
 * Locks that end with the process: flock(2) between processes, on descriptors that each process
 * opens once, and a mutex between its threads.
 */
#include <errno.h>
#include <string.h>
#include <sys/file.h>
#include <unistd.h>

#include "base/clock.h"
#include "content/cache/internal.h"

enum { STEP_US = 1000 };

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

static int have_state(struct cache *cache, struct error *error)
{
	int err = cache->has_state ? 0 : state_open(cache, error);

	cache->has_state = !err;
	if (err)
		cache_unlock(cache);
	return err;
}

int cache_lock(struct cache *cache)
{
	struct error error = {};
	int err = lock_both(&cache->lock, cache->lock_fd);

	return err ?: have_state(cache, &error);
}

int cache_lock_soon(struct cache *cache, unsigned ms, struct error *error)
{
	uint64_t until_ns = clock_now_ns() + ms * 1000000ull;
	int err;

	pthread_mutex_lock(&cache->lock);
	while (flock(cache->lock_fd, LOCK_EX | LOCK_NB)) {
		err = -errno;
		if (err == -EWOULDBLOCK && clock_now_ns() < until_ns) {
			usleep(STEP_US);
			continue;
		}
		pthread_mutex_unlock(&cache->lock);
		return error_set(error, err, "cannot lock the cache '%s': %s", cache->path,
				 strerror(-err));
	}
	return have_state(cache, error);
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
