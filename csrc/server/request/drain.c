/* SPDX-License-Identifier: MIT */
/*
 * map-drain fetches what is mapped in [`"from"`, `"to"`) into the cache, for about a second. The
 * reply has `"fetched_bytes"`; `"cached_bytes"`, which were there already; `"failed"`, examples
 * with offsets of the virtual data, and `"failed_units"`; `"uncached_units"`, which the cache has
 * no room for, so they are not fetched; and `"next"`, where to go on, or null. `"room_bytes"`, the
 * room that is left, and `"holds_bytes"`, the most that the cache can hold, must be given with the
 * next request. The reads are ordinary ones: they are verified, and share fetches with others.
 */
#include <errno.h>
#include <semaphore.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/size.h"
#include "lazy/cache.h"
#include "lazy/fetcher.h"
#include "lazy/keys.h"
#include "lazy/layout.h"
#include "lazy/read.h"
#include "server/request/request.h"

enum {
	READS = 32,
	BUFFER_BYTES = 4 << 20, /* of all reads in flight */
	QUEUE_BYTES = 8 << 20,	/* of units that the cache has not taken yet */
	DEADLINE_S = 10,
	/* A unit is cached a moment after it is delivered. */
	SETTLE_MS = 1000,
	SETTLE_STEP_MS = 5,
	EXAMPLES = 8,
};

struct drain_read {
	struct lazy_read read; /* must be the first member */
	struct drain *drain;
	uint64_t offset; /* in the virtual data */
	bool busy, done;
	int result;
};

struct drain {
	struct map_request *request;
	struct drain_read reads[READS];
	uint64_t busy_bytes;
	sem_t done; /* posted once for each read that is done */

	struct cache_room room; /* what is left of the room */
	uint64_t fetched_bytes, cached_bytes, failed_units, uncached_units;
	uint64_t no_room_units; /* uncached units that were not fetched for lack of room */
	json_t *failed;
};

static void read_done(struct lazy_read *read, int result)
{
	struct drain_read *mine = (struct drain_read *)read;

	mine->result = result;
	__atomic_store_n(&mine->done, true, __ATOMIC_RELEASE);
	sem_post(&mine->drain->done);
}

static void settle(struct drain *drain, struct drain_read *read)
{
	read->busy = read->done = false;
	free(read->read.data);
	drain->busy_bytes -= read->read.length;
	if (!read->result) {
		drain->fetched_bytes += read->read.length;
		return;
	}
	drain->failed_units++;
	drain->room.bytes += cache_room_of(read->read.length);
	if (json_array_size(drain->failed) < EXAMPLES)
		json_array_append_new(drain->failed,
				      json_pack("{s:I, s:s}", "offset", (json_int_t)read->offset,
						"error", strerror(-read->result)));
}

/* Waits until a read is done, and evaluates it. */
static void wait_for_one(struct drain *drain)
{
	while (sem_wait(&drain->done))
		;
	for (unsigned i = 0; i < READS; i++) {
		struct drain_read *read = &drain->reads[i];

		if (read->busy && __atomic_load_n(&read->done, __ATOMIC_ACQUIRE)) {
			settle(drain, read);
			return;
		}
	}
}

/* Waits for a while until the cache has taken what was fetched before. */
static void wait_for_cache(const struct drain *drain)
{
	const struct timespec step = { .tv_nsec = SETTLE_STEP_MS * 1000000L };
	uint64_t end_ns = clock_now_ns() + SETTLE_MS * 1000000ULL;

	while (fetcher_unstored_bytes(drain->request->space->fetcher) > QUEUE_BYTES &&
	       clock_now_ns() < end_ns)
		nanosleep(&step, NULL);
}

static struct drain_read *free_read(struct drain *drain, uint32_t length)
{
	wait_for_cache(drain);
	for (;;) {
		bool fits = !drain->busy_bytes || drain->busy_bytes + length <= BUFFER_BYTES;

		for (unsigned i = 0; fits && i < READS; i++) {
			if (!drain->reads[i].busy)
				return &drain->reads[i];
		}
		wait_for_one(drain);
	}
}

static void wait_for_all(struct drain *drain)
{
	for (unsigned i = 0; i < READS; i++) {
		while (drain->reads[i].busy)
			wait_for_one(drain);
	}
}

static bool is_cached(const struct drain *drain, struct source *source, uint64_t unit)
{
	struct cache_object *object = cache_object_of(source);

	if (!object && cache_object_open(drain->request->space->cache, source, &object))
		return false;
	return cache_has(object, unit, unit);
}

static int drain_unit(struct drain *drain, struct source *source, uint64_t unit, uint64_t offset)
{
	struct unit_extent extent = unit_extent(source, unit);
	uint32_t length = extent.length;
	struct drain_read *read;

	if (is_cached(drain, source, unit)) {
		drain->cached_bytes += length;
		return 0;
	}
	if (drain->room.bytes < cache_room_of(length)) {
		drain->no_room_units++;
		return 0;
	}
	read = free_read(drain, length);
	*read = (struct drain_read){
		.read = {
			.source = source,
			.offset = extent.offset,
			.length = length,
			.data = malloc(length),
			.deadline_ns = clock_now_ns() + DEADLINE_S * 1000000000ULL,
			.done = read_done,
		},
		.drain = drain,
		.offset = offset,
	};
	if (!read->read.data)
		return -ENOMEM;
	read->busy = true;
	drain->room.bytes -= cache_room_of(length);
	drain->busy_bytes += length;
	fetcher_read(drain->request->space->fetcher, &read->read);
	return 0;
}

/* Returns where it has stopped: at the end of the range, or before. */
static uint64_t drain_mapping(struct drain *drain, const struct mapping *mapping, uint64_t from,
			      uint64_t to, uint64_t end_ns)
{
	struct source *source = mapping->source;
	uint64_t at = from > mapping->offset ? from : mapping->offset;
	uint64_t end = mapping->offset + mapping->length;

	if (end > to)
		end = to;
	if (source->computed)
		return end;
	while (at < end && clock_now_ns() < end_ns && !control_call_is_over(drain->request->call)) {
		uint64_t in_source = at - mapping->offset + mapping->source_offset;
		uint64_t unit = unit_of(source, in_source);

		if (in_source >= source->size)
			return end;
		if (drain_unit(drain, source, unit, at))
			break;
		at += unit_end_offset(source, unit) - in_source;
	}
	return at < end ? at : end;
}

static uint64_t drain_range(struct drain *drain, uint64_t from, uint64_t to)
{
	const struct map *map = drain->request->space->map;
	uint64_t end_ns = map_request_page_end_ns(), at = from;
	const struct mapping *mapping = map_next(map, at);

	while (mapping && mapping->offset < to && clock_now_ns() < end_ns) {
		uint64_t end = mapping->offset + mapping->length;

		at = drain_mapping(drain, mapping, at, to, end_ns);
		if (at < end)
			break;
		mapping = map_next(map, at);
	}
	wait_for_all(drain);
	return mapping && mapping->offset < to && at < to ? at : to;
}

static uint64_t count_uncached_of(const struct drain *drain, const struct mapping *mapping,
				  uint64_t from, uint64_t to)
{
	struct source *source = mapping->source;
	uint64_t start = from > mapping->offset ? from - mapping->offset : 0;
	uint64_t length = mapping->offset + mapping->length < to ? mapping->length :
								   to - mapping->offset;
	uint64_t end = mapping->source_offset + length, count = 0;

	if (end > source->size)
		end = source->size;
	if (mapping->source_offset + start >= end)
		return 0;
	for (uint64_t unit = unit_of(source, mapping->source_offset + start);
	     unit <= unit_of(source, end - 1); unit++)
		count += !is_cached(drain, source, unit);
	return count;
}

static uint64_t count_uncached(const struct drain *drain, uint64_t from, uint64_t to)
{
	const struct map *map = drain->request->space->map;
	const struct mapping *mapping = map_next(map, from);
	uint64_t count = 0;

	for (; mapping && mapping->offset < to;
	     mapping = map_next(map, mapping->offset + mapping->length)) {
		if (!mapping->source->computed)
			count += count_uncached_of(drain, mapping, from, to);
	}
	return count;
}

/* Waits until all that was fetched is durable in the cache, or will not get there. */
static void settle_cache(struct drain *drain, uint64_t from, uint64_t to)
{
	const struct timespec step = { .tv_nsec = SETTLE_STEP_MS * 1000000L };
	uint64_t end_ns = clock_now_ns() + SETTLE_MS * 1000000ULL, count;
	uint64_t known = drain->failed_units + drain->no_room_units;

	while ((count = count_uncached(drain, from, to)) > known && clock_now_ns() < end_ns)
		nanosleep(&step, NULL);
	drain->uncached_units = drain->no_room_units + (count > known ? count - known : 0);
	cache_sync(drain->request->space->cache);
}

static int report(const struct drain *drain, uint64_t next, uint64_t to)
{
	json_t *more = json_pack(
		"{s:I, s:I, s:I, s:I, s:I, s:I, s:O, s:o}", "room_bytes",
		(json_int_t)drain->room.bytes, "holds_bytes", (json_int_t)drain->room.holds_bytes,
		"uncached_units", (json_int_t)drain->uncached_units, "fetched_bytes",
		(json_int_t)drain->fetched_bytes, "cached_bytes", (json_int_t)drain->cached_bytes,
		"failed_units", (json_int_t)drain->failed_units, "failed", drain->failed, "next",
		next < to ? json_integer((json_int_t)next) : json_null());
	int err = more ? json_object_update(drain->request->body, more) : -1;

	json_decref(more);
	return err ? -ENOMEM : 0;
}

static int add_ranges_of(const struct map_request *request, struct cache_ranges *ranges,
			 const struct mapping *mapping, uint64_t from, uint64_t to)
{
	struct source *source = mapping->source;
	uint64_t start = from > mapping->offset ? from - mapping->offset : 0;
	uint64_t end = to - mapping->offset;

	if (end > mapping->length)
		end = mapping->length;
	start += mapping->source_offset;
	end += mapping->source_offset;
	return map_request_add_range(request, ranges, source, unit_of(source, start),
				     unit_of(source, end - 1) + 1);
}

static int find_room(struct drain *drain, uint64_t from, uint64_t to)
{
	const struct map *map = drain->request->space->map;
	struct cache_ranges ranges = {};
	const struct mapping *mapping = map_next(map, from);
	int err = 0;

	while (!err && mapping && mapping->offset < to) {
		if (!mapping->source->computed)
			err = add_ranges_of(drain->request, &ranges, mapping, from, to);
		mapping = map_next(map, mapping->offset + mapping->length);
	}
	if (!err)
		err = cache_room_for(drain->request->space->cache, &ranges, true, &drain->room);
	cache_ranges_free(&ranges);
	return err;
}

/* The first page makes room; later ones are told what is left of it. */
static int take_room(struct drain *drain, uint64_t from, uint64_t to)
{
	struct map_request *request = drain->request;
	uint64_t room = UINT64_MAX;
	int err = keys_take_u64(request->keys, "room_bytes", false, &room, &request->error);

	if (!err)
		err = keys_take_u64(request->keys, "holds_bytes", false, &drain->room.holds_bytes,
				    &request->error);
	if (!err)
		err = keys_refuse_unknown(request->keys, &request->error);
	if (err)
		return err;
	if (!request->space->cache) {
		error_set_hint(&request->error, "name a directory: \"cache\" of the segment");
		return error_set(&request->error, -EOPNOTSUPP,
				 "the device has no cache to fetch into");
	}
	drain->room.bytes = room;
	return room == UINT64_MAX ? find_room(drain, from, to) : 0;
}

static int run(struct drain *drain, uint64_t from, uint64_t to)
{
	uint64_t next;
	int err;

	drain->failed = json_array();
	if (!drain->failed)
		return -ENOMEM;
	next = drain_range(drain, from, to);
	settle_cache(drain, from, next);
	err = report(drain, next, to);
	json_decref(drain->failed);
	return err;
}

static int drain(struct map_request *request)
{
	struct drain drain = { .request = request };
	uint64_t from, to;
	int err = map_request_take_range(request, &from, &to);

	if (!err)
		err = take_room(&drain, from, to);
	if (err)
		return err;
	sem_init(&drain.done, 0, 0);
	err = run(&drain, from, to);
	sem_destroy(&drain.done);
	return err;
}

MAP_REQUEST(map_drain_kind, "map-drain", drain);
