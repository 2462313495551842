/* SPDX-License-Identifier: MIT */
/*
 * btrfs-ublk-cache: does for `btrfs-ublk cache` what needs the format of a cache's files, which the
 * Python package does not know. Prints one JSON document.
 *
 *   DIRECTORY status		{"directory", "bytes", "free_bytes", "contents"}
 *   DIRECTORY units KEY	{"key", "size", "unit_bytes", "ranges"}
 *   DIRECTORY check KEY	{"checked", "rotten"}: units whose sums are not those of their data
 *   DIRECTORY drop KEY UNIT...	{"dropped"}
 *   DIRECTORY shrink BYTES	{"bytes", "evicted_bytes"}
 *   DIRECTORY limit MAX RESERVE	{"max_bytes", "reserve_bytes"}; RESERVE "-": as it is
 *   DIRECTORY remove KEY	{"evicted_bytes"}
 *   DIRECTORY pin KEY, unpin KEY	{"pinned"}
 */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "base/json_text.h"
#include "base/message.h"
#include "lazy/cache/admin.h"

struct call {
	struct cache *cache;
	char **words;
	int count;
	json_t *answer;
	struct error error;
};

static int parse_number(struct call *call, const char *text, uint64_t *number)
{
	char *end;

	errno = 0;
	*number = strtoull(text, &end, 10);
	if (errno || *end || end == text || *text == '-')
		return error_set(&call->error, -EINVAL, "'%s' is no number", text);
	return 0;
}

static int do_status(struct call *call)
{
	json_t *list, *stats;
	int err = cache_admin_list(call->cache, &list);

	if (err)
		return error_set(&call->error, err, "cannot read the cache: %s", strerror(-err));
	stats = cache_stats_json(call->cache);
	call->answer = json_pack("{s:O, s:O, s:O, s:o}", "directory",
				 json_object_get(stats, "directory"), "bytes",
				 json_object_get(stats, "bytes"), "free_bytes",
				 json_object_get(stats, "free_bytes"), "contents", list);
	json_decref(stats);
	return 0;
}

static int do_units(struct call *call)
{
	return cache_admin_units(call->cache, call->words[0], &call->answer, &call->error);
}

static int do_check(struct call *call)
{
	return cache_admin_check(call->cache, call->words[0], &call->answer, &call->error);
}

static int do_drop(struct call *call)
{
	size_t count = (size_t)call->count - 1;
	uint64_t *units = calloc(count ?: 1, sizeof(*units));
	int err = units ? 0 : -ENOMEM;

	for (size_t i = 0; i < count && !err; i++)
		err = parse_number(call, call->words[i + 1], &units[i]);
	if (!err)
		err = cache_admin_drop(call->cache, call->words[0], units, count, &call->error);
	free(units);
	if (!err)
		call->answer = json_pack("{s:I}", "dropped", (json_int_t)count);
	return err;
}

static json_int_t bytes_now(struct cache *cache)
{
	json_t *stats = cache_stats_json(cache);
	json_int_t bytes = json_integer_value(json_object_get(stats, "bytes"));

	json_decref(stats);
	return bytes;
}

static int do_shrink(struct call *call)
{
	json_int_t before = bytes_now(call->cache), after;
	uint64_t bytes;
	int err = parse_number(call, call->words[0], &bytes);

	if (!err)
		err = cache_shrink(call->cache, bytes);
	if (err && err != -ENOSPC)
		return error_set(&call->error, err, "cannot evict: %s", strerror(-err));
	after = bytes_now(call->cache);
	/* What is left is pinned, and the caller decides whether that is an error. */
	call->answer = json_pack("{s:I, s:I}", "bytes", after, "evicted_bytes",
				 before > after ? before - after : 0);
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
		err = error_set(&call->error, -EINVAL, "a limit is beyond 8 EiB");
	if (keep)
		reserve_bytes = CACHE_KEEP_RESERVE;
	if (!err)
		err = cache_admin_limit(call->cache, max_bytes, &reserve_bytes, &call->error);
	if (!err)
		call->answer = json_pack("{s:I, s:I}", "max_bytes", (json_int_t)max_bytes,
					 "reserve_bytes", (json_int_t)reserve_bytes);
	return err;
}

static int do_remove(struct call *call)
{
	uint64_t bytes = 0;
	int err = cache_admin_remove(call->cache, call->words[0], &bytes, &call->error);

	if (!err)
		call->answer = json_pack("{s:I}", "evicted_bytes", (json_int_t)bytes);
	return err;
}

static int pin(struct call *call, bool pinned)
{
	int err = cache_admin_pin(call->cache, call->words[0], pinned, &call->error);

	if (!err)
		call->answer = json_pack("{s:b}", "pinned", pinned);
	return err;
}

static int do_pin(struct call *call)
{
	return pin(call, true);
}

static int do_unpin(struct call *call)
{
	return pin(call, false);
}

static const struct {
	const char *name;
	int (*run)(struct call *call);
	int least, most; /* words that follow */
} commands[] = {
	{ "status", do_status, 0, 0 }, { "units", do_units, 1, 1 },
	{ "check", do_check, 1, 1 },   { "drop", do_drop, 1, INT32_MAX },
	{ "shrink", do_shrink, 1, 1 }, { "limit", do_limit, 2, 2 },
	{ "remove", do_remove, 1, 1 }, { "pin", do_pin, 1, 1 },
	{ "unpin", do_unpin, 1, 1 },
};

static int run(struct call *call, const char *directory, unsigned command)
{
	/* NB: opening the cache must not evict anything. */
	const struct cache_options options = { .reserve_bytes = 1 };
	struct stat status;
	int err;

	/* Do not make a cache that does not exist. */
	if (stat(directory, &status))
		return error_set(&call->error, -errno, "there is no cache '%s': %s", directory,
				 strerror(errno));
	err = cache_open(directory, &options, &call->cache, &call->error);
	if (err)
		return err;
	err = commands[command].run(call);
	cache_close(call->cache);
	return err;
}

int main(int argc, char **argv)
{
	struct call call = { .words = argv + 3, .count = argc - 3 };
	unsigned command, count = sizeof(commands) / sizeof(*commands);
	int err;

	message_init("btrfs-ublk-cache");
	if (argc == 2 && !strcmp(argv[1], "--version"))
		return print_version();
	for (command = 0; argc >= 3 && command < count; command++) {
		if (!strcmp(argv[2], commands[command].name))
			break;
	}
	if (argc < 3 || command == count || call.count < commands[command].least ||
	    call.count > commands[command].most)
		return msg_fail(
			EXIT_USAGE,
			"usage: btrfs-ublk-cache DIRECTORY status | units KEY | check KEY | drop KEY UNIT... "
			"| shrink BYTES | limit MAX RESERVE | remove KEY | pin KEY | unpin KEY");
	err = run(&call, argv[1], command);
	if (err) {
		error_set_text(&call.error, "%s", strerror(-err)); /* unless there is one */
		msg_error_of(&call.error);
		return err == -EINVAL || err == -ENOENT ? EXIT_USAGE : EXIT_FAILED;
	}
	return json_text_print(call.answer) ? EXIT_FAILED : EXIT_OK;
}
