/* SPDX-License-Identifier: MIT */
/* The contents in the directory, whichever process has put them there. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/array.h"
#include "base/cleanup.h"
#include "base/clock.h"
#include "content/cache/internal.h"

static bool is_bits(const char *name)
{
	uint8_t key[SOURCE_KEY_BYTES];

	return cache_key_parse(name, key) && !strcmp(name + CACHE_NAME_BYTES - 1, ".bits");
}

static int add_content(struct cache *cache, const char *name)
{
	struct content *content;
	char data[CACHE_NAME_BYTES + 8];
	struct stat status;

	snprintf(data, sizeof(data), "%.*s.data", CACHE_NAME_BYTES - 1, name);
	if (fstatat(cache->dir_fd, data, &status, AT_SYMLINK_NOFOLLOW))
		return 0;
	if (array_reserve(cache->contents, cache->content_room, cache->content_count + 1))
		return -ENOMEM;
	content = &cache->contents[cache->content_count++];
	memcpy(content->name, name, CACHE_NAME_BYTES - 1);
	content->name[CACHE_NAME_BYTES - 1] = '\0';
	content->disk_bytes = (uint64_t)status.st_blocks * 512;
	return 0;
}

int contents_read(struct cache *cache)
{
	int fd = openat(cache->dir_fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	DIR *directory = fd < 0 ? NULL : fdopendir(fd);
	const struct dirent *entry;
	int err = 0;

	if (!directory) {
		err = -errno;
		cleanup_close(&fd);
		return err;
	}
	contents_free(cache);
	while (!err && (entry = readdir(directory))) {
		if (is_bits(entry->d_name))
			err = add_content(cache, entry->d_name);
	}
	closedir(directory);
	cache->contents_read_ns = clock_now_ns();
	return err;
}

void contents_free(struct cache *cache)
{
	free(cache->contents);
	cache->contents = NULL;
	cache->content_count = cache->content_room = 0;
}

bool content_is_pinned(struct cache *cache, const char *name)
{
	char pin[CACHE_NAME_BYTES + 8];

	snprintf(pin, sizeof(pin), "%s.pin", name);
	return !faccessat(cache->dir_fd, pin, F_OK, AT_SYMLINK_NOFOLLOW);
}

int content_acquire(struct cache *cache, const struct content *content,
		    struct cache_object **object, struct error *error)
{
	uint8_t key[SOURCE_KEY_BYTES];

	if (!cache_key_parse(content->name, key))
		return -EINVAL;
	pthread_mutex_lock(&cache->objects_lock);
	for (*object = cache->objects; *object; *object = (*object)->next) {
		if (!memcmp((*object)->header.key, key, sizeof(key)))
			break;
	}
	pthread_mutex_unlock(&cache->objects_lock);
	return *object ? 0 : object_open(cache, key, NULL, object, error);
}

void content_release(struct cache_object *object)
{
	if (!object->listed)
		object_close(object);
}

int cache_recount(struct cache *cache)
{
	uint64_t before = cache_bytes(cache), bytes = 0;
	int err = contents_read(cache);

	if (err)
		return err;
	for (size_t i = 0; i < cache->content_count; i++) {
		struct error error = {};
		struct cache_object *object;

		/* A content that cannot be opened is discarded when a source needs it. */
		if (content_acquire(cache, &cache->contents[i], &object, &error))
			continue;
		bytes += object_count_bytes(object);
		content_release(object);
	}
	/* NB: add the difference, since other processes add to the sum meanwhile. */
	cache_add_bytes(cache, (int64_t)(bytes - before));
	cache->recounted_ns = clock_now_ns();
	return 0;
}
