/* SPDX-License-Identifier: MIT */
/*
 * A range of virtual data that a map fills over time (docs/materialisation.md): `"map"`, `"cache"` (or
 * none), `"map_offset"` (bytes, default 0), `"unmapped"` ("error" or "zero"), `"deadline_s"` (default
 * 30; null: none), `"complete"` (bytes per second, or "idle"; default: not), `"via"` (rules of the
 * server, for all maps: fetch/mirror/via.h).
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/keys.h"
#include "base/message.h"
#include "base/size.h"
#include "content/cache.h"
#include "fetch/mirror/via.h"
#include "lazy/complete.h"
#include "lazy/fetcher.h"
#include "lazy/prefetch.h"
#include "lazy/space.h"
#include "server/engine.h"
#include "server/segment.h"
#include "server/segment/lazy_request.h"

enum { DEADLINE_DEFAULT_S = 30, DEADLINE_MAX_S = 24 * 3600 };

static int parse_unmapped(struct segment *segment, json_t *keys, struct error *error)
{
	struct lazy_segment *lazy = segment->private;
	char *word = NULL;
	int err = keys_take_string(keys, "unmapped", false, &word, error);

	if (err || !word)
		return err;
	lazy->unmapped_zero = !strcmp(word, "zero");
	if (!lazy->unmapped_zero && strcmp(word, "error") != 0) {
		err = error_set(error, -EINVAL,
				"\"unmapped\" is \"%s\", it must be \"error\" or \"zero\"", word);
	}
	free(word);
	return err;
}

static int parse_deadline(struct segment *segment, json_t *keys, struct error *error)
{
	struct lazy_segment *lazy = segment->private;
	const json_t *found = json_object_get(keys, "deadline_s");
	double seconds = DEADLINE_DEFAULT_S;

	if (json_is_null(found))
		lazy->deadline_ns = 0;
	else if (found && !json_is_number(found))
		seconds = -1;
	else if (found)
		seconds = json_number_value(found);
	if (seconds <= 0 || seconds > DEADLINE_MAX_S)
		return error_set(
			error, -EINVAL,
			"\"deadline_s\" must be a positive number of seconds, at most %d, or "
			"null (none)",
			DEADLINE_MAX_S);
	if (!json_is_null(found))
		lazy->deadline_ns = (uint64_t)(seconds * 1e9) ?: 1;
	json_object_del(keys, "deadline_s");
	return 0;
}

static int parse_complete(struct segment *segment, json_t *keys, struct error *error)
{
	struct lazy_segment *lazy = segment->private;
	const json_t *found = json_object_get(keys, "complete");
	const char *word = json_string_value(found);
	json_int_t rate = json_integer_value(found);

	lazy->complete.wanted = found && !json_is_null(found);
	lazy->complete.bytes_per_s = rate > 0 ? (uint64_t)rate : 0;
	if (lazy->complete.wanted && rate <= 0 && (!word || strcmp(word, "idle") != 0))
		return error_set(
			error, -EINVAL,
			"\"complete\" must be a positive number of bytes per second, or \"idle\"");
	if (lazy->complete.wanted && !lazy->cache_path)
		return error_set(error, -EINVAL, "\"complete\" needs a \"cache\"");
	json_object_del(keys, "complete");
	return 0;
}

static int parse_via(json_t *keys, struct error *error)
{
	const json_t *rules = json_object_get(keys, "via");
	int err = rules ? via_rules_set(VIA_OF_DEVICE, rules, error) : 0;

	json_object_del(keys, "via");
	return err;
}

static int lazy_parse(struct segment *segment, json_t *keys, struct error *error)
{
	struct lazy_segment *lazy = segment->private;
	int err = keys_take_string(keys, "map", true, &lazy->map_path, error);

	if (!err)
		err = keys_take_string(keys, "cache", false, &lazy->cache_path, error);
	if (!err)
		err = keys_take_u64(keys, "map_offset", false, &lazy->map_offset, error);
	if (!err)
		err = parse_unmapped(segment, keys, error);
	if (!err)
		err = parse_deadline(segment, keys, error);
	if (!err)
		err = parse_complete(segment, keys, error);
	if (!err)
		err = parse_via(keys, error);
	if (err)
		return err;
	if (lazy->map_offset % BLOCK_BYTES || lazy->map_offset > INT64_MAX - segment->length)
		return error_set(error, -EINVAL,
				 "\"map_offset\" %llu is not a multiple of %u, or the "
				 "segment reaches beyond 8 EiB of the virtual data",
				 (unsigned long long)lazy->map_offset, BLOCK_BYTES);
	return 0;
}

static int lazy_open(struct engine *engine, struct segment *segment)
{
	struct lazy_segment *lazy = segment->private;
	struct error error = {};
	int err;

	/* The cache is locked, perhaps by the server that this one replaces. */
	if (engine->dry)
		return 0;
	err = space_open(lazy->map_path, lazy->cache_path, &lazy->complete, lazy->map_offset,
			 lazy->map_offset + segment->length, &lazy->space, &error);
	if (err) {
		msg_error("segment %u (lazy): %s", segment->index, error.text);
		if (*error.hint)
			msg_hint("%s", error.hint);
		return err;
	}
	engine->wants_messages = true;
	return 0;
}

static void lazy_close(struct segment *segment)
{
	struct lazy_segment *lazy = segment->private;

	space_close(lazy->space);
	free(lazy->map_path);
	free(lazy->cache_path);
	via_rules_free(VIA_OF_DEVICE);
}

static void lazy_abandon(struct segment *segment)
{
	const struct lazy_segment *lazy = segment->private;

	fetcher_abandon(lazy->space->fetcher);
}

static int add_space(json_t *list, const struct space *space)
{
	json_t *about = json_pack("{s:s, s:s?, s:I, s:o, s:o, s:o}", "map", space->map_path,
				  "cache_directory", space->cache_path, "mappings",
				  (json_int_t)map_count(space->map), "fetcher",
				  fetcher_stats_json(space->fetcher), "prefetch",
				  prefetch_json(fetcher_prefetch(space->fetcher)), "complete",
				  complete_json(fetcher_complete(space->fetcher)));

	if (about && space->cache &&
	    json_object_set_new(about, "cache", cache_stats_json(space->cache))) {
		json_decref(about);
		about = NULL;
	}
	return json_array_append_new(list, about);
}

static int lazy_add_stats(const struct segment *segment, json_t *stats)
{
	json_t *list = json_array();
	int err = json_object_set_new(stats, "lazy", list);

	for (struct space *space = space_first(); space && !err; space = space->next)
		err = add_space(list, space);
	return err;
}

static const struct segment_ops lazy_ops = {
	.name = "lazy",
	.private_bytes = sizeof(struct lazy_segment),
	.waits = true,
	.parse = lazy_parse,
	.open = lazy_open,
	.close = lazy_close,
	.read = lazy_request_begin,
	.complete = lazy_request_complete,
	.abandon = lazy_abandon,
	.add_stats = lazy_add_stats,
};
SEGMENT_KIND(lazy_ops);
