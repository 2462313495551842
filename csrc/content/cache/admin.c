/* SPDX-License-Identifier: MIT */
/* Administration of a cache, while servers use it. */
#include "content/cache/admin.h"

#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/cleanup.h"
#include "content/cache/internal.h"

/* A command with its words, and what comes of it. */
struct call {
	struct cache *cache;
	char **words;
	int count;
	bool locked;
	json_t *answer;
	struct error *error;
};

static int parse_number(struct call *call, const char *text, uint64_t *number)
{
	char *end;

	errno = 0;
	*number = strtoull(text, &end, 10);
	if (errno || *end || end == text || *text == '-')
		return error_set(call->error, -EINVAL, "'%s' is no number", text);
	return 0;
}

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

static int do_status(struct call *call)
{
	struct cache *cache = call->cache;
	json_t *list = json_array(), *stats;
	int err = contents_read(cache);

	for (size_t i = 0; i < cache->content_count && !err; i++)
		err = json_array_append_new(list, content_json(cache, &cache->contents[i])) ?
			      -ENOMEM :
			      0;
	if (err) {
		json_decref(list);
		return error_set(call->error, err, "cannot read the cache: %s", strerror(-err));
	}
	stats = cache_stats_json(cache);
	call->answer = json_pack("{s:O, s:O, s:O, s:o}", "directory",
				 json_object_get(stats, "directory"), "bytes",
				 json_object_get(stats, "bytes"), "free_bytes",
				 json_object_get(stats, "free_bytes"), "contents", list);
	json_decref(stats);
	return 0;
}

/* The caller closes `object`, with the directory locked. */
static int acquire(struct call *call, struct cache_object **object)
{
	const char *name = call->words[0];
	struct cache *cache = call->cache;
	struct error *error = call->error;
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

static int do_units(struct call *call)
{
	struct cache_object *object;
	uint64_t first = 0, unit;
	bool before = false;
	json_t *ranges;
	int err = acquire(call, &object);

	if (err)
		return err;
	ranges = json_array();
	for (unit = 0; unit <= object->units; unit++) {
		bool now = unit < object->units && object_has(object, unit);

		if (now && !before)
			first = unit;
		else if (before && !now)
			err |= add_range(ranges, first, unit);
		before = now;
	}
	call->answer = json_pack("{s:s, s:I, s:i, s:o}", "key", call->words[0], "size",
				 (json_int_t)object->size, "unit_bytes", (int)object->unit_bytes,
				 "ranges", ranges);
	content_release(object);
	return err ? -ENOMEM : 0;
}

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

static int do_check(struct call *call)
{
	struct cache_object *object;
	int err = acquire(call, &object);

	if (err)
		return err;
	/* All units are read, which takes too long for others to wait. */
	cache_unlock(call->cache);
	call->answer = check_units(object);
	call->locked = !cache_lock(call->cache);
	content_release(object);
	return 0;
}

static int do_drop(struct call *call)
{
	size_t count = (size_t)call->count - 1;
	uint64_t *units = calloc(count ?: 1, sizeof(*units));
	struct cache_object *object;
	int err = units ? 0 : -ENOMEM;

	for (size_t i = 0; i < count && !err; i++)
		err = parse_number(call, call->words[i + 1], &units[i]);
	if (!err)
		err = acquire(call, &object);
	if (err)
		goto out;
	for (size_t i = 0; i < count && !err; i++)
		err = cache_drop(object, units[i]);
	if (err)
		error_set_text(call->error, "cannot drop units of %s: %s", call->words[0],
			       strerror(-err));
	content_release(object);
	call->answer = json_pack("{s:I}", "dropped", (json_int_t)count);
out:
	free(units);
	return err;
}

static int do_shrink(struct call *call)
{
	uint64_t before = cache_bytes(call->cache), after, bytes;
	int err = parse_number(call, call->words[0], &bytes);

	if (!err)
		err = cache_shrink(call->cache, bytes);
	if (err && err != -ENOSPC)
		return error_set(call->error, err, "cannot evict: %s", strerror(-err));
	after = cache_bytes(call->cache);
	/* What is left is pinned, and the caller decides whether that is an error. */
	call->answer = json_pack("{s:I, s:I}", "bytes", (json_int_t)after, "evicted_bytes",
				 before > after ? (json_int_t)(before - after) : 0);
	return 0;
}

static int do_limit(struct call *call)
{
	uint64_t max_bytes, reserve_bytes = 0;
	bool keep = !strcmp(call->words[1], "-");
	int err = parse_number(call, call->words[0], &max_bytes);

	if (!err && !keep)
		err = parse_number(call, call->words[1], &reserve_bytes);
	if (!err && (max_bytes > INT64_MAX || reserve_bytes > INT64_MAX))
		err = error_set(call->error, -EINVAL, "a limit is beyond 8 EiB");
	if (!err && keep)
		reserve_bytes = limits_reserve(call->cache);
	if (!err)
		err = limits_write(call->cache, max_bytes, reserve_bytes, call->error);
	call->answer = json_pack("{s:I, s:I}", "max_bytes", (json_int_t)max_bytes, "reserve_bytes",
				 (json_int_t)reserve_bytes);
	return err;
}

static int do_remove(struct call *call)
{
	const char *key = call->words[0];
	struct cache *cache = call->cache;
	struct cache_object *object;
	int64_t evicted = 0;
	int err = acquire(call, &object);

	call->answer = json_pack("{s:i}", "evicted_bytes", 0);
	if (err == -EUCLEAN)
		return content_remove(cache, key);
	if (err)
		return err;
	if (content_is_pinned(cache, key)) {
		error_set_hint(call->error, "btrfs-ublk cache unpin %s", key);
		err = error_set(call->error, -EPERM, "content %s is pinned", key);
	} else {
		evicted = object_empty(object, 0, object->units, NULL);
	}
	content_release(object);
	if (evicted < 0)
		err = error_set(call->error, (int)evicted, "cannot remove content %s: %s", key,
				strerror((int)-evicted));
	/* It is in use, so its empty files stay. */
	if (!err)
		content_remove(cache, key);
	json_object_set_new(call->answer, "evicted_bytes", json_integer(evicted));
	return err;
}

/* NB: with the lock, so that no eviction continues that has not seen the pin. */
static int pin(struct call *call, bool pinned)
{
	const int dir_fd = call->cache->dir_fd;
	const char *key = call->words[0];
	char pin[CACHE_NAME_BYTES + 8];
	uint8_t parsed[SOURCE_KEY_BYTES];
	int fd, err = 0;

	if (strlen(key) != CACHE_NAME_BYTES - 1 || !cache_key_parse(key, parsed))
		return error_set(call->error, -EINVAL, "'%s' is no key: 64 hexadecimal digits",
				 key);
	snprintf(pin, sizeof(pin), "%s.pin", key);
	if (pinned) {
		fd = openat(dir_fd, pin, O_WRONLY | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0600);
		err = fd < 0 ? -errno : 0;
		cleanup_close(&fd);
	} else if (unlinkat(dir_fd, pin, 0) && errno != ENOENT) {
		err = -errno;
	}
	if (!err && fsync(dir_fd))
		err = -errno;
	if (err)
		return error_set(call->error, err, "cannot %s content %s: %s",
				 pinned ? "pin" : "unpin", key, strerror(-err));
	call->answer = json_pack("{s:b}", "pinned", pinned);
	return 0;
}

static int do_pin(struct call *call)
{
	return pin(call, true);
}

static int do_unpin(struct call *call)
{
	return pin(call, false);
}

static const struct command {
	const char *name;
	int (*run)(struct call *call);
	int least, most; /* words that follow */
	bool locked;	 /* runs with the cache's lock */
} commands[] = {
	{ "status", do_status, 0, 0, true }, { "units", do_units, 1, 1, true },
	{ "check", do_check, 1, 1, true },   { "drop", do_drop, 1, INT32_MAX, true },
	{ "limit", do_limit, 2, 2, true },   { "shrink", do_shrink, 1, 1, false },
	{ "remove", do_remove, 1, 1, true }, { "pin", do_pin, 1, 1, true },
	{ "unpin", do_unpin, 1, 1, true },
};

enum { COMMANDS = sizeof(commands) / sizeof(*commands) };

static int run(struct call *call, const struct command *command)
{
	int err = command->locked ? cache_lock(call->cache) : 0;

	if (err)
		return error_set(call->error, err, "cannot lock the cache: %s", strerror(-err));
	call->locked = command->locked;
	err = command->run(call);
	if (call->locked)
		cache_unlock(call->cache);
	return !err && !call->answer ? -ENOMEM : err;
}

int cache_admin(const char *directory, char **words, int count, json_t **answer,
		struct error *error)
{
	/* NB: opening the cache must not evict anything. */
	const struct cache_options options = { .reserve_bytes = 1 };
	struct call call = { .words = words + 1, .count = count - 1, .error = error };
	const struct command *command = commands;
	struct stat status;
	int err;

	for (; count > 0 && command < commands + COMMANDS; command++) {
		if (!strcmp(command->name, words[0]) && call.count >= command->least &&
		    call.count <= command->most)
			break;
	}
	if (count < 1 || command == commands + COMMANDS)
		return error_set(
			error, -EINVAL,
			"usage: btrfs-ublk-cache DIRECTORY status | units KEY | check KEY "
			"| drop KEY UNIT... | shrink BYTES | limit MAX RESERVE | remove KEY "
			"| pin KEY | unpin KEY");
	/* Do not make a cache that does not exist. */
	if (stat(directory, &status))
		return error_set(error, -errno, "there is no cache '%s': %s", directory,
				 strerror(errno));
	err = cache_open(directory, &options, &call.cache, error);
	if (err)
		return err;
	err = run(&call, command);
	cache_close(call.cache);
	if (err)
		json_decref(call.answer);
	else
		*answer = call.answer;
	return err;
}
