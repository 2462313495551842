/* SPDX-License-Identifier: MIT */
/* Opens and closes a cache, and makes its statistics. */
#include "content/cache.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/vfs.h>
#include <time.h>
#include <unistd.h>

#include "base/cleanup.h"
#include "base/message.h"
#include "base/utf8.h"
#include "content/cache/internal.h"

enum {
	/* A server that starts may be the recovery of a mounted device. */
	LOCK_WAIT_MS = 100,
};

static int open_directory(const char *path, int *fd, struct error *error)
{
	struct stat status;
	int err;

	if (mkdir(path, 0700) && errno != EEXIST) {
		err = -errno;
		return error_set(error, err, "cannot make the cache's directory '%s': %s", path,
				 strerror(-err));
	}
	*fd = open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
	if (*fd < 0) {
		err = -errno;
		return error_set(error, err, "cannot open the cache's directory '%s': %s", path,
				 err == -ELOOP || err == -ENOTDIR ?
					 "a symbolic link, or not a directory" :
					 strerror(-err));
	}
	if (fstat(*fd, &status))
		return error_set(error, -errno, "'%s': %s", path, strerror(errno));
	if (status.st_uid != geteuid() || status.st_mode & 077) {
		error_set_text(
			error,
			"the cache's directory '%s' belongs to user %u and has mode %03o: others "
			"could change what is read",
			path, (unsigned)status.st_uid, (unsigned)status.st_mode & 0777);
		error_set_hint(error, "it must be user %u's, with mode 700", (unsigned)geteuid());
		return -EPERM;
	}
	return 0;
}

static int open_file(const struct cache *cache, const char *name, int *fd, struct error *error)
{
	int err;

	*fd = openat(cache->dir_fd, name, O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0600);
	if (*fd >= 0)
		return 0;
	err = -errno;
	return error_set(error, err, "cannot open '%s' in the cache's directory '%s': %s", name,
			 cache->path, strerror(-err));
}

static void raise_file_limit(void)
{
	struct rlimit limit;
	rlim_t wanted = 2 * CACHE_OBJECTS_MAX + 1024;

	if (getrlimit(RLIMIT_NOFILE, &limit) || limit.rlim_cur >= wanted)
		return;
	limit.rlim_cur = limit.rlim_max < wanted ? limit.rlim_max : wanted;
	setrlimit(RLIMIT_NOFILE, &limit);
}

static int cache_init(struct cache *cache, const char *directory, struct error *error)
{
	struct statfs system;
	int err = open_directory(directory, &cache->dir_fd, error);

	if (err)
		return err;
	if (fstatfs(cache->dir_fd, &system))
		return error_set(error, -errno, "'%s': %s", directory, strerror(errno));
	cache->in_memory = system.f_type == TMPFS_MAGIC || system.f_type == RAMFS_MAGIC;
	cache->default_reserve_bytes = (uint64_t)system.f_blocks * (uint64_t)system.f_bsize / 20;
	cache->has_own_limits = cache->options.max_bytes || cache->options.reserve_bytes;
	if (!cache->options.reserve_bytes)
		cache->options.reserve_bytes = cache->default_reserve_bytes;
	err = limits_read(cache, error);
	if (err)
		return err;
	err = open_file(cache, "lock", &cache->lock_fd, error);
	if (!err)
		err = open_file(cache, "state", &cache->state_fd, error);
	if (err)
		return err;
	raise_file_limit();
	/* If another process has locked it, the first content that is opened waits for that. */
	err = cache_lock_soon(cache, LOCK_WAIT_MS, error);
	if (!err)
		cache_unlock(cache);
	else if (err != -EAGAIN)
		return err;
	*error = (struct error){};
	err = pending_start(cache);
	return err ? error_set(error, err, "cannot start the cache's thread: %s", strerror(-err)) :
		     0;
}

int cache_open(const char *directory, const struct cache_options *options, struct cache **cache,
	       struct error *error)
{
	struct cache *made = calloc(1, sizeof(*made));
	pthread_condattr_t monotonic;
	int err;

	if (!made)
		return error_set(error, -ENOMEM, "no memory for a cache");
	made->options = *options;
	/*
	 * Unlike calloc(3), this touches the memory: threads that serve write to it, and must not
	 * wait for pages.
	 */
	explicit_bzero(made->recent, sizeof(made->recent));
	made->dir_fd = made->lock_fd = made->state_fd = -1;
	pthread_mutex_init(&made->lock, NULL);
	pthread_mutex_init(&made->objects_lock, NULL);
	pthread_mutex_init(&made->pending_lock, NULL);
	pthread_mutex_init(&made->state_lock, NULL);
	pthread_mutex_init(&made->frequency_lock, NULL);
	pthread_condattr_init(&monotonic);
	pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
	pthread_cond_init(&made->wake, &monotonic);
	pthread_cond_init(&made->drained, NULL);
	pthread_condattr_destroy(&monotonic);
	made->path = strdup(directory);
	err = made->path ? cache_init(made, directory, error) :
			   error_set(error, -ENOMEM, "no memory for a cache");
	if (err) {
		cache_close(made);
		return err;
	}
	*cache = made;
	return 0;
}

void cache_close(struct cache *cache)
{
	struct cache_object *next;

	if (!cache)
		return;
	if (pending_stop(cache)) {
		msg_warning("the cache '%s' is left: its disk does not answer", cache->path);
		return;
	}
	for (struct cache_object *object = cache->objects; object; object = next) {
		next = object->next;
		object_close(object);
	}
	contents_free(cache);
	free(cache->frequency);
	cleanup_close(&cache->state_fd);
	cleanup_close(&cache->lock_fd);
	cleanup_close(&cache->dir_fd);
	pthread_cond_destroy(&cache->wake);
	pthread_cond_destroy(&cache->drained);
	pthread_mutex_destroy(&cache->frequency_lock);
	pthread_mutex_destroy(&cache->state_lock);
	pthread_mutex_destroy(&cache->pending_lock);
	pthread_mutex_destroy(&cache->objects_lock);
	pthread_mutex_destroy(&cache->lock);
	free(cache->path);
	free(cache);
}

json_t *cache_stats_json(struct cache *cache)
{
	struct cache_counters now;
	struct statvfs system;
	uint64_t free_bytes = 0, *from = (uint64_t *)&cache->counters, *to = (uint64_t *)&now;
	unsigned pending, objects;

	for (size_t i = 0; i < sizeof(now) / sizeof(*to); i++)
		to[i] = __atomic_load_n(&from[i], __ATOMIC_RELAXED);
	pthread_mutex_lock(&cache->pending_lock);
	pending = cache->pending_count;
	pthread_mutex_unlock(&cache->pending_lock);
	/* NB: without objects_lock, which may be held for minutes while a content is scanned. */
	objects = __atomic_load_n(&cache->object_count, __ATOMIC_RELAXED);
	if (!fstatvfs(cache->dir_fd, &system))
		free_bytes = (uint64_t)system.f_bavail * system.f_frsize;
	return json_pack(
		"{s:o, s:I, s:I, s:I, s:I, s:i, s:i, s:I, s:I, s:I, s:I, s:I, s:I, s:I, "
		"s:I, s:I, s:I}",
		"directory", utf8_json(cache->path), "bytes", (json_int_t)cache_bytes(cache),
		"max_bytes", (json_int_t)cache_max_bytes(cache), "reserve_bytes",
		(json_int_t)cache_reserve_bytes(cache), "free_bytes", (json_int_t)free_bytes,
		"open_contents", (int)objects, "pending_units", (int)pending, "put_units",
		(json_int_t)now.put_units, "put_bytes", (json_int_t)now.put_bytes, "durable_units",
		(json_int_t)now.durable_units, "evicted_units", (json_int_t)now.evicted_units,
		"evicted_bytes", (json_int_t)now.evicted_bytes, "dropped_units",
		(json_int_t)now.dropped_units, "lost_units", (json_int_t)now.lost_units, "no_room",
		(json_int_t)now.no_room, "failed", (json_int_t)now.failed, "syncs",
		(json_int_t)now.syncs);
}
