/* SPDX-License-Identifier: MIT */
#include "lazy/space.h"

#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "base/cleanup.h"
#include "base/message.h"
#include "base/size.h"
#include "content/cache.h"
#include "fetch/coded.h"
#include "fetch/dependence.h"
#include "fetch/inquiry.h"
#include "fetch/process/front.h"
#include "lazy/fetcher.h"

/* Only the thread that opens and closes segments changes this, while there is no other thread. */
static struct space *spaces;
/* Spaces that could not be freed, because a thread of theirs hangs. */
static struct space *left;

struct space *space_first(void)
{
	return spaces;
}

static bool is_same(const char *one, const char *other)
{
	return one && other ? !strcmp(one, other) : one == other;
}

static struct space *find(const char *map_path)
{
	struct space *space = spaces;

	while (space && strcmp(space->map_path, map_path) != 0)
		space = space->next;
	return space;
}

/* Returns the space that has this file under another name, or NULL. */
static struct space *find_file(const char *map_path)
{
	struct space *space = spaces;
	struct stat wanted, status;

	if (stat(map_path, &wanted))
		return NULL;
	while (space && (stat(store_path(space->store), &status) ||
			 status.st_dev != wanted.st_dev || status.st_ino != wanted.st_ino))
		space = space->next;
	return space;
}

static int join(struct space *space, const char *cache_path,
		const struct complete_options *complete, uint64_t start, uint64_t end,
		struct error *error)
{
	if (!is_same(space->cache_path, cache_path))
		return error_set(
			error, -EINVAL, "map '%s' has cache '%s' here and '%s' in another segment",
			space->map_path, cache_path ?: "(none)", space->cache_path ?: "(none)");
	if (complete->wanted != space->complete.wanted ||
	    complete->bytes_per_s != space->complete.bytes_per_s)
		return error_set(error, -EINVAL,
				 "map '%s' has another \"complete\" in another segment",
				 space->map_path);
	if (start < space->room.start)
		space->room.start = space->room.shown_start = start;
	if (end > space->room.end)
		space->room.end = space->room.shown_end = end;
	space->users++;
	return 0;
}

/*
 * Checks the files of a server that takes a device over, which may be mounted already and contain
 * them.
 *
 * NB: do not open a file that SQLite has open here: closing it would drop SQLite's locks (POSIX).
 */
static int check_place(const char *path, struct error *error)
{
	_cleanup_close_ int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);

	return fd < 0 ? 0 : dependence_check(fd, path, error);
}

static int check_names(const char *map_path, struct error *error)
{
	const struct space *other = find_file(map_path);

	if (!other)
		return 0;
	error_set_hint(error, "name it in all segments as in the first");
	return error_set(error, -EINVAL, "map '%s' is the same file as '%s' of another segment",
			 map_path, other->map_path);
}

/* A device must come back after a crash although the disk of its cache is full or broken. */
static int open_cache(struct space *space, struct error *error)
{
	const struct cache_options options = {};
	int err = cache_open(space->cache_path, &options, &space->cache, error);

	if (err != -EIO && err != -ENOSPC && err != -EDQUOT && err != -EROFS)
		return err;
	msg_warning("%s; what is fetched is not cached", error->text);
	*error = (struct error){};
	return 0;
}

static uint64_t number_in(const char *variable)
{
	const char *text = getenv(variable);

	return text ? strtoull(text, NULL, 10) : 0;
}

/*
 * Who asks servers: a process without privileges; or this one, if the environment says `in-process`.
 * Tests name a program in place of that process there, and how long it stays.
 */
static int use_process(bool *spawns, struct error *error)
{
	const char *program = getenv("BTRFS_UBLK_FETCH") ?: "";
	int err;

	*spawns = strcmp(program, "in-process") != 0;
	if (!*spawns)
		return 0;
	err = front_use(*program && strcmp(program, "process") ? program : NULL,
			(unsigned)number_in("BTRFS_UBLK_FETCH_IDLE_MS"));
	return err ? error_set(error, err, "cannot open btrfs-ublk-fetch: %s", strerror(-err)) : 0;
}

static int open_parts(struct space *space, struct error *error)
{
	static const struct store_fetch_ops store_ops = { coded_wrap, mirror_probe };
	/* The variables are for measuring, and for tests. */
	struct fetcher_options fetcher_options = {
		.run_bytes = number_in("BTRFS_UBLK_RUN_BYTES"),
		.silent_ms = (unsigned)number_in("BTRFS_UBLK_SILENT_MS"),
	};
	int err = use_process(&fetcher_options.spawns, error);

	if (!err)
		err = check_names(space->map_path, error);
	if (!err)
		err = check_place(space->map_path, error);
	if (!err && space->cache_path)
		err = check_place(space->cache_path, error);
	if (err)
		return err;
	space->map = map_new();
	if (!space->map)
		return error_set(error, -ENOMEM, "no memory for a map");
	err = store_open(space->map_path, space->map, &store_ops, &space->store, error);
	if (!err && space->cache_path)
		err = open_cache(space, error);
	if (err)
		return err;
	err = fetcher_start(&fetcher_options, space->store, space->cache, &space->fetcher);
	if (err)
		return error_set(error, err, "cannot start the fetcher: %s", strerror(-err));
	store_use_fetcher(space->store, space->fetcher);
	if (space->complete.wanted && space->cache)
		complete_begin(fetcher_complete(space->fetcher), space->map, &space->complete);
	return 0;
}

/* Free the fetcher first, because it uses all others. */
static void free_space(struct space *space)
{
	if (space->fetcher && fetcher_stop(space->fetcher)) {
		msg_warning("the fetcher of map '%s' does not end: some file does not answer",
			    space->map_path);
		space->next = left;
		left = space;
		return;
	}
	if (space->cache)
		cache_close(space->cache);
	if (space->store)
		store_close(space->store);
	if (space->map)
		map_free(space->map);
	trace_deinit(&space->trace);
	free(space->map_path);
	free(space->cache_path);
	free(space);
}

int space_open(const char *map_path, const char *cache_path,
	       const struct complete_options *complete, uint64_t start, uint64_t end,
	       struct space **space, struct error *error)
{
	struct space *made = find(map_path);
	int err;

	if (made) {
		err = join(made, cache_path, complete, start, end, error);
		*space = err ? NULL : made;
		return err;
	}
	made = calloc(1, sizeof(*made));
	if (!made)
		return error_set(error, -ENOMEM, "no memory");
	made->map_path = strdup(map_path);
	made->cache_path = cache_path ? strdup(cache_path) : NULL;
	made->room = (struct store_room){ .start = start,
					  .end = end,
					  .alignment = BLOCK_BYTES,
					  .shown_start = start,
					  .shown_end = end };
	made->users = 1;
	made->complete = *complete;
	trace_init(&made->trace);
	if (!made->map_path || (cache_path && !made->cache_path))
		err = error_set(error, -ENOMEM, "no memory");
	else
		err = open_parts(made, error);
	if (err) {
		free_space(made);
		return err;
	}
	made->next = spaces;
	spaces = made;
	*space = made;
	return 0;
}

void space_close(struct space *space)
{
	struct space **place = &spaces;

	if (!space || --space->users)
		return;
	while (*place != space)
		place = &(*place)->next;
	*place = space->next;
	free_space(space);
}
