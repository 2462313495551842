/* SPDX-License-Identifier: MIT */
/*
 * prefetch-start fetches what is mapped in [`"from"`, `"to"`), or `"extents"`, a list of [SOURCE,
 * OFFSET, LENGTH], where SOURCE is the number of a source in the map, and the others are bytes of
 * it. With `"in_file": true`, a file, whose descriptor comes with the request, has one such list
 * per line. Options are `"bytes_per_s"`, `"at_once"` (units), and `"follow"`: the prefetch ends
 * when its client stops asking. The reply has `"prefetch"`, as in statistics.
 *
 * prefetch-status returns `"prefetch"`, or null. With `"follow"` and its number, the reply comes
 * when it is over, or after a second; if the client leaves meanwhile, or does not ask again, the
 * prefetch ends.
 *
 * prefetch-cancel returns `"prefetch"` as it is at its end.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/array.h"
#include "base/cleanup.h"
#include "base/json_text.h"
#include "base/keys.h"
#include "base/size.h"
#include "content/cache.h"
#include "content/layout.h"
#include "lazy/fetcher.h"
#include "lazy/prefetch.h"
#include "server/request/request.h"

enum {
	INLINE_MAX = 4096,
	STEP_MS = 20,
};

#define FILE_BYTES_MAX MIB(64)

struct extents {
	struct prefetch_extent *list;
	size_t count, room;
};

static int grow(struct extents *extents, struct error *error)
{
	if (extents->count >= PREFETCH_EXTENTS_MAX) {
		error_set_hint(error, "prefetch a part of it, and then the next one");
		return error_set(error, -E2BIG, "more than %d ranges are too many at once",
				 PREFETCH_EXTENTS_MAX);
	}
	return array_reserve(extents->list, extents->room, extents->count + 1);
}

/* Adds bytes of a source, as the units that contain them. */
static int append(struct extents *extents, struct source *source, uint64_t offset, uint64_t length,
		  struct error *error)
{
	struct prefetch_extent *last = extents->count ? &extents->list[extents->count - 1] : NULL;
	uint64_t first, end;
	int err;

	if (source->computed || !length || offset >= source->size)
		return 0;
	if (length > source->size - offset)
		length = source->size - offset;
	first = unit_of(source, offset);
	end = unit_of(source, offset + length - 1) + 1;
	if (last && last->source == source && first >= last->first &&
	    first <= last->first + last->count) {
		if (end > last->first + last->count)
			last->count = end - last->first;
		return 0;
	}
	err = grow(extents, error);
	if (err)
		return err;
	extents->list[extents->count++] = (struct prefetch_extent){
		.source = source,
		.first = first,
		.count = end - first,
	};
	return 0;
}

static int take_row(struct map_request *request, const json_t *row, struct extents *extents)
{
	struct error *error = &request->error;
	json_int_t words[3] = { -1, -1, -1 };
	struct source *source;

	for (unsigned i = 0; i < 3 && json_array_size(row) == 3; i++) {
		if (json_is_integer(json_array_get(row, i)))
			words[i] = json_integer_value(json_array_get(row, i));
	}
	if (words[0] < 0 || words[1] < 0 || words[2] < 0)
		return error_set(
			error, -EINVAL,
			"range %zu (counted from 0) is not [SOURCE, OFFSET, LENGTH], three "
			"numbers that are not negative",
			extents->count);
	source = words[0] ? store_source(request->space->store, (uint64_t)words[0]) : NULL;
	if (!source)
		return error_set(error, -ENOENT, "the map has no source %lld", (long long)words[0]);
	return append(extents, source, (uint64_t)words[1], (uint64_t)words[2], error);
}

static int take_inline(struct map_request *request, struct extents *extents)
{
	json_t *rows = json_object_get(request->keys, "extents");
	const json_t *row;
	size_t i;
	int err = 0;

	if (!json_is_array(rows) || json_array_size(rows) > INLINE_MAX)
		return error_set(&request->error, -EINVAL,
				 "\"extents\" must be a list, of at most %d; more come in a file",
				 INLINE_MAX);
	json_array_foreach (rows, i, row) {
		if (!err)
			err = take_row(request, row, extents);
	}
	json_object_del(request->keys, "extents");
	return err;
}

static int take_file(struct map_request *request, struct extents *extents)
{
	_cleanup_fclose_ FILE *file = NULL;
	_cleanup_free_ char *line = NULL;
	size_t room = 0;
	int err = map_request_open_lines(request, FILE_BYTES_MAX, &file);

	while (!err && map_request_next_line(&line, &room, file, &err)) {
		json_t *row = json_text_parse(line, strlen(line), JSON_REJECT_DUPLICATES, NULL);

		err = control_call_is_over(request->call) ? -ECANCELED :
							    take_row(request, row, extents);
		json_decref(row);
	}
	return err;
}

static int take_mapped(struct map_request *request, struct extents *extents)
{
	const struct map *map = request->space->map;
	const struct mapping *mapping;
	uint64_t from, to;
	int err = map_request_take_range(request, &from, &to);

	mapping = err ? NULL : map_next(map, from);
	while (!err && mapping && mapping->offset < to) {
		uint64_t start = from > mapping->offset ? from : mapping->offset;
		uint64_t end = mapping->offset + mapping->length;

		err = append(extents, mapping->source,
			     mapping->source_offset + (start - mapping->offset),
			     (end < to ? end : to) - start, &request->error);
		mapping = map_next(map, end);
	}
	return err;
}

static int take_extents(struct map_request *request, struct extents *extents)
{
	bool in_file = false;
	int err = keys_take_bool(request->keys, "in_file", &in_file, &request->error);

	if (err)
		return err;
	if (in_file)
		return take_file(request, extents);
	if (json_object_get(request->keys, "extents"))
		return take_inline(request, extents);
	return take_mapped(request, extents);
}

static int take_plan(struct map_request *request, struct prefetch_plan *plan)
{
	struct error *error = &request->error;
	uint64_t at_once = PREFETCH_AT_ONCE_DEFAULT;
	int err = keys_take_u64(request->keys, "bytes_per_s", false, &plan->bytes_per_s, error);

	if (!err)
		err = keys_take_u64(request->keys, "at_once", false, &at_once, error);
	if (!err)
		err = keys_take_bool(request->keys, "follow", &plan->followed, error);
	if (!err)
		err = keys_refuse_unknown(request->keys, error);
	if (!err && (!at_once || at_once > PREFETCH_AT_ONCE_MAX))
		err = error_set(error, -EINVAL, "\"at_once\" is %llu, it must be 1 to %d",
				(unsigned long long)at_once, PREFETCH_AT_ONCE_MAX);
	plan->at_once = (unsigned)at_once;
	return err;
}

static int answer(struct map_request *request)
{
	json_t *prefetch = prefetch_json(fetcher_prefetch(request->space->fetcher));

	return json_object_set_new(request->body, "prefetch", prefetch) ? -ENOMEM : 0;
}

static int find_room(struct map_request *request, struct prefetch_plan *plan)
{
	struct cache_ranges ranges = {};
	int err = 0;

	for (size_t i = 0; i < plan->count && !err; i++) {
		const struct prefetch_extent *extent = &plan->extents[i];

		err = map_request_add_range(request, &ranges, extent->source, extent->first,
					    extent->first + extent->count);
	}
	if (!err)
		err = cache_room_for(request->space->cache, &ranges, true, &plan->room);
	cache_ranges_free(&ranges);
	return err;
}

static int start(struct map_request *request)
{
	struct prefetch_plan plan = {};
	struct extents extents = {};
	uint64_t id;
	int err;

	if (!request->space->cache) {
		error_set_hint(&request->error, "name a directory: \"cache\" of the segment");
		return error_set(&request->error, -EOPNOTSUPP,
				 "the device has no cache to prefetch into");
	}
	err = take_extents(request, &extents);
	if (!err)
		err = take_plan(request, &plan);
	plan.extents = extents.list;
	plan.count = extents.count;
	/* NB: check first, because a refused prefetch must not evict anything. */
	if (!err && prefetch_is_running(fetcher_prefetch(request->space->fetcher), 0))
		err = -EBUSY;
	if (!err)
		err = find_room(request, &plan);
	if (!err)
		err = prefetch_start(fetcher_prefetch(request->space->fetcher), &plan, &id);
	if (!err)
		return answer(request);
	free(extents.list);
	if (err == -EBUSY) {
		error_set_hint(&request->error, "ask for its status, or cancel it");
		err = error_set(&request->error, err, "a prefetch is running already");
	}
	return err;
}

MAP_REQUEST(prefetch_start_kind, "prefetch-start", start);

static void follow(struct map_request *request, uint64_t id)
{
	const struct timespec pause = { .tv_nsec = STEP_MS * 1000000L };
	struct prefetch *prefetch = fetcher_prefetch(request->space->fetcher);
	uint64_t end_ns = map_request_page_end_ns();

	prefetch_follow(prefetch, id);
	while (prefetch_is_running(prefetch, id) && clock_now_ns() < end_ns) {
		if (control_call_is_over(request->call)) {
			prefetch_cancel(prefetch, id);
			return;
		}
		nanosleep(&pause, NULL);
	}
	prefetch_follow(prefetch, id);
	/* Units that are reported as done must be durable. */
	if (!prefetch_is_running(prefetch, id) && request->space->cache)
		cache_sync(request->space->cache);
}

static int status(struct map_request *request)
{
	uint64_t id = 0;
	int err = keys_take_u64(request->keys, "follow", false, &id, &request->error);

	if (!err)
		err = keys_refuse_unknown(request->keys, &request->error);
	if (err)
		return err;
	if (id)
		follow(request, id);
	return answer(request);
}

MAP_REQUEST(prefetch_status_kind, "prefetch-status", status);

static int cancel(struct map_request *request)
{
	const struct timespec pause = { .tv_nsec = STEP_MS * 1000000L };
	struct prefetch *prefetch = fetcher_prefetch(request->space->fetcher);
	uint64_t end_ns = map_request_page_end_ns();
	json_t *now = prefetch_json(prefetch);
	uint64_t id = (uint64_t)json_integer_value(json_object_get(now, "id"));
	int err = keys_refuse_unknown(request->keys, &request->error);

	json_decref(now);
	if (err)
		return err;
	prefetch_cancel(prefetch, id);
	while (prefetch_is_running(prefetch, id) && clock_now_ns() < end_ns)
		nanosleep(&pause, NULL);
	return answer(request);
}

MAP_REQUEST(prefetch_cancel_kind, "prefetch-cancel", cancel);
