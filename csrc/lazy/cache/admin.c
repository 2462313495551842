/* SPDX-License-Identifier: MIT */
/* Administration of a cache, while servers use it. */
#include "lazy/cache/admin.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/cleanup.h"
#include "lazy/cache/internal.h"

enum { EVICT_AT_ONCE = 1024 };

static bool is_in_use(const struct cache *cache, const char *name)
{
	_cleanup_close_ int fd = -1;
	char data[CACHE_NAME_BYTES + 8];

	snprintf(data, sizeof(data), "%s.data", name);
	/* Open it again, because a lock that this process holds would not show. */
	fd = openat(cache->dir_fd, data, O_RDONLY | O_NOFOLLOW | O_CLOEXEC);
	return fd >= 0 && flock(fd, LOCK_EX | LOCK_NB);
}

/* When it was last read or written, in seconds since the epoch, as far as the file system knows. */
static time_t last_use(const struct cache *cache, const char *name)
{
	char data[CACHE_NAME_BYTES + 8];
	struct stat status;

	snprintf(data, sizeof(data), "%s.data", name);
	if (fstatat(cache->dir_fd, data, &status, AT_SYMLINK_NOFOLLOW))
		return 0;
	return status.st_atime > status.st_mtime ? status.st_atime : status.st_mtime;
}

static json_t *content_json(struct cache *cache, const struct content *content)
{
	struct error error = {};
	struct cache_object *object;
	bool in_use = is_in_use(cache, content->name);
	json_t *about;

	if (content_acquire(cache, content, &object, &error))
		return json_pack("{s:s, s:s}", "key", content->name, "error", error.text);
	about = json_pack("{s:s, s:I, s:i, s:I, s:I, s:I, s:b, s:b, s:I}", "key", content->name,
			  "size", (json_int_t)object->size, "unit_bytes", (int)object->unit_bytes,
			  "units", (json_int_t)object->units, "cached_units",
			  (json_int_t)object_count_units(object), "cached_bytes",
			  (json_int_t)object_count_bytes(object), "pinned",
			  content_is_pinned(cache, content->name), "in_use", in_use, "last_use_s",
			  (json_int_t)last_use(cache, content->name));
	content_release(object);
	return about;
}

int cache_admin_list(struct cache *cache, json_t **list)
{
	int err = cache_lock(cache);

	if (err)
		return err;
	*list = json_array();
	err = contents_read(cache);
	for (size_t i = 0; i < cache->content_count && !err; i++)
		err = json_array_append_new(*list, content_json(cache, &cache->contents[i])) ?
			      -ENOMEM :
			      0;
	cache_unlock(cache);
	if (err)
		json_decref(*list);
	return err;
}

/* The caller closes `object`, with the directory locked. */
static int acquire(struct cache *cache, const char *name, struct cache_object **object,
		   struct error *error)
{
	struct content content = {};
	int err;

	if (strlen(name) != CACHE_NAME_BYTES - 1)
		return error_set(error, -EINVAL, "'%s' is no key: 64 hexadecimal digits", name);
	memcpy(content.name, name, sizeof(content.name));
	err = content_acquire(cache, &content, object, error);
	if (err == -ENOENT)
		error_set_text(error, "the cache '%s' has no content %s", cache->path, name);
	else if (err == -EINVAL)
		error_set_text(error, "'%s' is no key: 64 hexadecimal digits", name);
	return err;
}

static int add_range(json_t *ranges, uint64_t first, uint64_t end)
{
	return json_array_append_new(ranges,
				     json_pack("[I, I]", (json_int_t)first, (json_int_t)(end - 1)));
}

int cache_admin_units(struct cache *cache, const char *key, json_t **units, struct error *error)
{
	struct cache_object *object;
	uint64_t first = 0, unit;
	bool before = false;
	json_t *ranges;
	int err = cache_lock(cache);

	if (err)
		return error_set(error, err, "cannot lock the cache: %s", strerror(-err));
	err = acquire(cache, key, &object, error);
	if (err)
		goto out;
	ranges = json_array();
	for (unit = 0; unit <= object->units; unit++) {
		bool now = unit < object->units && object_has(object, unit);

		if (now && !before)
			first = unit;
		else if (before && !now)
			err |= add_range(ranges, first, unit);
		before = now;
	}
	*units = json_pack("{s:s, s:I, s:i, s:o}", "key", key, "size", (json_int_t)object->size,
			   "unit_bytes", (int)object->unit_bytes, "ranges", ranges);
	if (err || !*units)
		err = error_set(error, -ENOMEM, "no memory for a list of units");
	content_release(object);
out:
	cache_unlock(cache);
	return err;
}

/* Reads all units, so it runs without the directory's lock. */
static json_t *check_units(const struct cache_object *object)
{
	json_t *rotten = json_array();
	uint64_t checked = 0;

	for (uint64_t unit = 0; unit < object->units && rotten; unit++) {
		if (!object_has(object, unit))
			continue;
		checked++;
		/* A unit that was evicted meanwhile is not rotten. */
		if (!sums_match_file(object, unit) && object_has(object, unit) &&
		    json_array_append_new(rotten, json_integer((json_int_t)unit))) {
			json_decref(rotten);
			rotten = NULL;
		}
	}
	return json_pack("{s:I, s:o}", "checked", (json_int_t)checked, "rotten", rotten);
}

int cache_admin_check(struct cache *cache, const char *key, json_t **found, struct error *error)
{
	struct cache_object *object;
	bool locked;
	int err = cache_lock(cache);

	if (err)
		return error_set(error, err, "cannot lock the cache: %s", strerror(-err));
	err = acquire(cache, key, &object, error);
	cache_unlock(cache);
	if (err)
		return err;
	*found = check_units(object);
	if (!*found)
		err = error_set(error, -ENOMEM, "no memory for a list of units");
	locked = !cache_lock(cache);
	content_release(object);
	if (locked)
		cache_unlock(cache);
	return err;
}

int cache_admin_drop(struct cache *cache, const char *key, const uint64_t *units, size_t count,
		     struct error *error)
{
	struct cache_object *object;
	int err = cache_lock(cache);

	if (err)
		return error_set(error, err, "cannot lock the cache: %s", strerror(-err));
	err = acquire(cache, key, &object, error);
	if (!err) {
		for (size_t i = 0; i < count && !err; i++)
			err = cache_drop(object, units[i]);
		if (err)
			error_set_text(error, "cannot drop units of %s: %s", key, strerror(-err));
		content_release(object);
	}
	cache_unlock(cache);
	return err;
}

static int64_t empty(struct cache_object *object)
{
	uint64_t units[EVICT_AT_ONCE];
	int64_t bytes = 0;

	for (uint64_t unit = 0; unit < object->units;) {
		int64_t evicted;
		size_t count = 0;

		for (; unit < object->units && count < EVICT_AT_ONCE; unit++) {
			if (object_has(object, unit))
				units[count++] = unit;
		}
		evicted = count ? object_evict(object, units, count, false, NULL) : 0;
		if (evicted < 0)
			return evicted;
		bytes += evicted;
	}
	return bytes;
}

int cache_admin_remove(struct cache *cache, const char *key, uint64_t *bytes, struct error *error)
{
	struct cache_object *object = NULL;
	int64_t evicted = 0;
	int err = cache_lock(cache);

	if (err)
		return error_set(error, err, "cannot lock the cache: %s", strerror(-err));
	*bytes = 0;
	err = acquire(cache, key, &object, error);
	if (err == -EUCLEAN)
		err = content_remove(cache, key);
	if (err || !object)
		goto out;
	if (content_is_pinned(cache, key)) {
		error_set_hint(error, "btrfs-ublk cache unpin %s", key);
		err = error_set(error, -EPERM, "content %s is pinned", key);
	} else {
		evicted = empty(object);
	}
	content_release(object);
	if (evicted < 0)
		err = error_set(error, (int)evicted, "cannot remove content %s: %s", key,
				strerror((int)-evicted));
	/* It is in use, so its empty files stay. */
	if (!err)
		content_remove(cache, key);
	*bytes = err ? 0 : (uint64_t)evicted;
out:
	cache_unlock(cache);
	return err;
}

int cache_admin_pin(struct cache *cache, const char *key, bool pinned, struct error *error)
{
	char pin[CACHE_NAME_BYTES + 8];
	uint8_t parsed[SOURCE_KEY_BYTES];
	int fd, err;

	if (strlen(key) != CACHE_NAME_BYTES - 1 || !cache_key_parse(key, parsed))
		return error_set(error, -EINVAL, "'%s' is no key: 64 hexadecimal digits", key);
	snprintf(pin, sizeof(pin), "%s.pin", key);
	/* When this returns, no eviction continues that has not seen the pin. */
	err = cache_lock(cache);
	if (err)
		return error_set(error, err, "cannot lock the cache: %s", strerror(-err));
	if (pinned) {
		fd = openat(cache->dir_fd, pin, O_WRONLY | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0600);
		err = fd < 0 ? -errno : 0;
		cleanup_close(&fd);
	} else if (unlinkat(cache->dir_fd, pin, 0) && errno != ENOENT) {
		err = -errno;
	}
	if (!err && fsync(cache->dir_fd))
		err = -errno;
	cache_unlock(cache);
	return err ? error_set(error, err, "cannot %s content %s: %s", pinned ? "pin" : "unpin",
			       key, strerror(-err)) :
		     0;
}
