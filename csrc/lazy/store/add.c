/* SPDX-License-Identifier: MIT */
/*
 * Adds mappings, all or none. Everything that can fail happens before the commit; after it, the map
 * in memory is updated from memory that was reserved.
 */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/json_text.h"
#include "base/relaxed.h"
#include "base/size.h"
#include "lazy/store/internal.h"

struct request {
	struct store *store;
	struct new_source *sources;
	size_t source_count;
	struct store_addition *additions;
	size_t count;
	const struct store_room *room;
	const bool *over;
	uint64_t losses;   /* of jansson, when it began */
	struct map *batch; /* the new mappings of this request */
	uint64_t new_sources;
	sqlite3_stmt *insert, *find;
	struct error *error;
};

/* Says in the error which mapping is wrong. */
static int blame(const struct request *request, const struct store_addition *addition, int err)
{
	request->error->of = "mapping";
	request->error->number = (size_t)(addition - request->additions);
	return err;
}

static bool is_over(const struct request *request)
{
	return request->over && relaxed_load(request->over);
}

/* Does the same for sources. */
static int blame_source(const struct request *request, size_t index, int err)
{
	request->error->of = "source";
	request->error->number = index;
	return err;
}

static int parse_sources(struct request *request, const json_t *descriptions)
{
	size_t count = json_array_size(descriptions), failed;
	int err;

	request->sources = calloc(count ?: 1, sizeof(*request->sources));
	if (!request->sources)
		return error_set(request->error, -ENOMEM, "no memory for sources");
	request->source_count = count;
	for (size_t i = 0; i < count; i++) {
		if (is_over(request))
			return -ECANCELED;
		err = new_source_init(request->store, json_array_get(descriptions, i),
				      &request->sources[i], request->error);
		if (err)
			return blame_source(request, i, err);
	}
	err = new_sources_ask(request->store, request->sources, count, request->over, &failed,
			      request->error);
	if (err)
		return blame_source(request, failed, err);
	for (size_t i = 0; i < count; i++) {
		if (!request->sources[i].size_is_wanted)
			continue;
		err = new_source_take_size(&request->sources[i], request->error);
		if (err)
			return blame_source(request, i, err);
	}
	return 0;
}

static struct source *source_of(const struct request *request,
				const struct store_addition *addition)
{
	const struct new_source *made = &request->sources[addition->source];

	return made->known ?: made->source;
}

static int take_rest(const struct request *request, struct store_addition *addition)
{
	uint64_t size = source_of(request, addition)->size;

	if (addition->source_offset >= size)
		return error_set(request->error, -EINVAL,
				 "the source has %" PRIu64 " bytes, so nothing from %" PRIu64 " on",
				 size, addition->source_offset);
	addition->length = round_up_u64(size, BLOCK_BYTES) - addition->source_offset;
	return 0;
}

static int check_shown(const struct request *request, const struct store_addition *addition)
{
	const struct store_room *room = request->room;

	if (!room ||
	    (addition->offset >= room->shown_start && addition->offset <= room->shown_end &&
	     addition->length <= room->shown_end - addition->offset))
		return 0;
	error_set_hint(request->error, "choose an offset within it, or let one be found (auto)");
	return error_set(request->error, -EINVAL,
			 "%" PRIu64 " bytes at %" PRIu64 " could never be read: the device shows "
			 "offsets %" PRIu64 " to %" PRIu64 " of the virtual data",
			 addition->length, addition->offset, room->shown_start, room->shown_end);
}

static int check_addition(const struct request *request, struct store_addition *addition)
{
	struct error *error = request->error;
	bool anywhere = addition->offset == STORE_ANYWHERE;
	uint64_t offset = anywhere ? 0 : addition->offset, size;

	if (addition->source >= request->source_count)
		return error_set(error, -EINVAL, "source %u is not among the %zu sources",
				 addition->source, request->source_count);
	if (request->sources[addition->source].is_empty)
		return error_set(error, -EINVAL, "the source is empty (0 bytes)");
	if (addition->length == STORE_REST && take_rest(request, addition))
		return -EINVAL;
	if (!addition->length)
		return error_set(error, -EINVAL, "the length is 0");
	if ((offset | addition->length | addition->source_offset) % BLOCK_BYTES)
		return error_set(error, -EINVAL,
				 "offset %" PRIu64 ", length %" PRIu64 " and source offset %" PRIu64
				 " must be multiples of %u",
				 offset, addition->length, addition->source_offset, BLOCK_BYTES);
	if (offset > INT64_MAX || addition->length > INT64_MAX - offset)
		return error_set(error, -EINVAL, "%" PRIu64 " bytes at %" PRIu64 " end behind 2^63",
				 addition->length, offset);
	size = source_of(request, addition)->size;
	if (addition->source_offset > round_up_u64(size, BLOCK_BYTES) ||
	    addition->length > round_up_u64(size, BLOCK_BYTES) - addition->source_offset)
		return error_set(error, -EINVAL,
				 "%" PRIu64 " bytes at %" PRIu64 " of a source that has %" PRIu64,
				 addition->length, addition->source_offset, size);
	return anywhere ? 0 : check_shown(request, addition);
}

static bool is_same(const struct mapping *mapping, const struct store_addition *addition,
		    const struct source *source)
{
	return mapping->offset == addition->offset && mapping->length == addition->length &&
	       mapping->source == source && mapping->source_offset == addition->source_offset;
}

static int refuse(const struct request *request, const struct store_addition *addition,
		  const struct mapping *conflict)
{
	error_set_hint(request->error, "what is mapped stays so: choose another offset, or let "
				       "one be found (auto)");
	return error_set(request->error, -EEXIST,
			 "%" PRIu64 " bytes at %" PRIu64 " are mapped already: %" PRIu64
			 " bytes at %" PRIu64 ", to source %" PRIu64 " at %" PRIu64,
			 addition->length, addition->offset, conflict->length, conflict->offset,
			 conflict->source->id, conflict->source_offset);
}

/*
 * Puts the addition into the batch unless it is there already, or in the map; `made` is its source.
 */
static int place(struct request *request, struct store_addition *addition, struct source *source)
{
	const struct mapping *conflict =
		map_overlap(request->store->map, addition->offset, addition->length);
	const struct mapping mapping = {
		.offset = addition->offset,
		.length = addition->length,
		.source = source,
		.source_offset = addition->source_offset,
	};
	int err = conflict ? -EEXIST : map_add(request->batch, &mapping, &conflict);

	addition->existed = conflict && is_same(conflict, addition, source);
	if (addition->existed)
		return 0;
	if (conflict)
		return refuse(request, addition, conflict);
	return err ? error_set(request->error, err, "no memory for mappings") : 0;
}

/* Finds the lowest range that is free in the map and in the batch. */
static bool find_room(const struct request *request, const struct store_addition *addition,
		      uint64_t *offset)
{
	const struct store_room *room = request->room;
	uint64_t at = room->start, also;

	for (;;) {
		if (!map_find_room(request->store->map, at, room->end, addition->length,
				   room->alignment, &at) ||
		    !map_find_room(request->batch, at, room->end, addition->length, room->alignment,
				   &also))
			return false;
		if (also == at)
			break;
		at = also;
	}
	*offset = at;
	return true;
}

/*
 * Finds an identical mapping from before, so that a request whose reply was lost can be repeated.
 * Returns 1 and sets addition->offset, 0, or a negative errno.
 */
static int find_same(const struct request *request, struct store_addition *addition,
		     const struct source *source)
{
	const struct store_room *room = request->room;
	sqlite3_stmt *find = request->find;
	int found;

	sqlite3_bind_int64(find, 1, (sqlite3_int64)source->id);
	sqlite3_bind_int64(find, 2, (sqlite3_int64)addition->source_offset);
	sqlite3_bind_int64(find, 3, (sqlite3_int64)addition->length);
	sqlite3_bind_int64(find, 4, (sqlite3_int64)room->start);
	sqlite3_bind_int64(find, 5, (sqlite3_int64)(room->end - addition->length));
	sqlite3_bind_int64(find, 6, (sqlite3_int64)room->alignment);
	found = sql_step(find);
	if (found == 1)
		addition->offset = (uint64_t)sqlite3_column_int64(find, 0);
	sqlite3_reset(find);
	return found;
}

static int choose_offset(struct request *request, struct store_addition *addition,
			 const struct source *source)
{
	const struct store_room *room = request->room;
	char length[SIZE_TEXT_BYTES];
	int found;

	if (!room || !room->alignment || room->alignment % BLOCK_BYTES ||
	    room->alignment > INT64_MAX)
		return error_set(request->error, -EINVAL,
				 "the alignment is %" PRIu64 ", it must be a multiple of %u",
				 room ? room->alignment : 0, BLOCK_BYTES);
	if (room->start <= room->end && room->end - room->start >= addition->length &&
	    room->end <= INT64_MAX) {
		found = find_same(request, addition, source);
		if (found < 0)
			return sql_error_set(request->store->writer, "read", request->error);
		if (found || find_room(request, addition, &addition->offset))
			return 0;
	}
	error_set_hint(request->error, "the device is too small for more, or the room that was "
				       "asked for is");
	return error_set(request->error, -ENOSPC,
			 "no %s are free from %" PRIu64 " to %" PRIu64 " on a multiple of %" PRIu64,
			 size_format(addition->length, length), room->start, room->end,
			 room->alignment);
}

static int insert(const struct request *request, const struct store_addition *addition,
		  uint64_t source)
{
	sqlite3_stmt *insert = request->insert;

	sqlite3_bind_int64(insert, 1, (sqlite3_int64)addition->offset);
	sqlite3_bind_int64(insert, 2, (sqlite3_int64)addition->length);
	sqlite3_bind_int64(insert, 3, (sqlite3_int64)source);
	sqlite3_bind_int64(insert, 4, (sqlite3_int64)addition->source_offset);
	sqlite3_bind_int64(insert, 5,
			   store_mapping_sum(addition->offset, addition->length, source,
					     addition->source_offset));
	return sql_do(insert) ? sql_error_set(request->store->writer, "write to", request->error) :
				0;
}

/* Stores the source of a mapping: unmapped sources do not come into the map. */
static int store_source_of(struct request *request, const struct store_addition *addition,
			   struct source **source)
{
	struct new_source *made = &request->sources[addition->source];
	int err = 0;

	if (!made->known && !made->id) {
		uint64_t id = request->store->source_count + request->new_sources + 1;

		err = new_source_store(request->store, made, id, request->error);
		if (made->id == id)
			request->new_sources++;
	}
	if (err)
		return err;
	if (!made->known && made->source->id == made->id)
		made->known = made->source;
	*source = made->known;
	/* A source that the request describes twice is the first of the two. */
	for (size_t i = 0; !*source && i < request->source_count; i++) {
		if (request->sources[i].source && request->sources[i].source->id == made->id)
			*source = request->sources[i].source;
	}
	made->known = *source;
	return *source ? 0 :
			 error_set(request->error, -EUCLEAN,
				   "the map has source %" PRIu64 ", which this server has not "
				   "added",
				   made->id);
}

/* Where nothing is mapped, there is only its length to answer with. */
static bool is_of_nothing(const struct request *request, struct store_addition *addition)
{
	if (addition->source >= request->source_count ||
	    !request->sources[addition->source].is_empty || addition->length != STORE_REST ||
	    addition->source_offset)
		return false;
	addition->offset = addition->offset == STORE_ANYWHERE ? 0 : addition->offset;
	addition->length = 0;
	return true;
}

static int add_one(struct request *request, struct store_addition *addition)
{
	struct source *source;
	int err;

	if (is_of_nothing(request, addition))
		return 0;
	err = check_addition(request, addition);

	if (!err)
		err = store_source_of(request, addition, &source);
	if (!err && addition->offset == STORE_ANYWHERE)
		err = choose_offset(request, addition, source);
	if (!err)
		err = place(request, addition, source);
	if (!err && !addition->existed)
		err = insert(request, addition, source->id);
	return err ? blame(request, addition, err) : 0;
}

static int add_all(struct request *request)
{
	struct store *store = request->store;
	int err = store_begin(store);

	if (!err)
		err = sql_prepare(store->writer, "INSERT INTO mappings VALUES(?1, ?2, ?3, ?4, ?5)",
				  &request->insert);
	if (!err)
		err = sql_prepare(store->writer,
				  "SELECT offset FROM mappings WHERE source = ?1 AND"
				  " source_offset = ?2 AND length = ?3 AND offset BETWEEN ?4 AND ?5"
				  " AND offset % ?6 = 0 ORDER BY offset LIMIT 1",
				  &request->find);
	if (err)
		return sql_error_set(store->writer, "write to", request->error);
	for (size_t i = 0; i < request->count; i++) {
		err = add_one(request, &request->additions[i]);
		if (err)
			return err;
	}
	if (json_text_losses() != request->losses ||
	    store_reserve_sources(store, request->new_sources) ||
	    map_reserve(store->map, map_count(request->batch)))
		return error_set(request->error, -ENOMEM, "no memory for mappings");
	return store_commit(store) ? sql_error_set(store->writer, "write to", request->error) : 0;
}

/* Nothing here can fail. */
static void publish(struct request *request)
{
	struct store *store = request->store;
	const struct mapping *conflict, *mapping = map_next(request->batch, 0);

	store->source_count += request->new_sources;
	for (size_t i = 0; i < request->source_count; i++) {
		struct source *source = request->sources[i].source;

		if (!source || !source->id)
			continue;
		store->sources[source->id - 1] = source;
		request->sources[i].source = NULL;
	}
	for (; mapping; mapping = map_next(request->batch, mapping->offset + mapping->length))
		map_add(store->map, mapping, &conflict);
}

static int run(struct request *request)
{
	int err;

	request->batch = map_new();
	if (!request->batch)
		return error_set(request->error, -ENOMEM, "no memory for mappings");
	pthread_mutex_lock(&request->store->write_lock);
	err = add_all(request);
	sqlite3_finalize(request->insert);
	sqlite3_finalize(request->find);
	if (err)
		store_rollback(request->store);
	else
		publish(request);
	pthread_mutex_unlock(&request->store->write_lock);
	map_free(request->batch);
	return err;
}

int store_add(struct store *store, const json_t *sources, struct store_addition *additions,
	      size_t count, const struct store_room *room, const bool *over, struct error *error)
{
	struct request request = {
		.store = store,
		.additions = additions,
		.count = count,
		.room = room,
		.over = over,
		.losses = json_text_losses(),
		.error = error,
	};
	int err = parse_sources(&request, sources);

	if (!err)
		err = run(&request);
	for (size_t i = 0; i < request.source_count; i++)
		new_source_deinit(&request.sources[i]);
	free(request.sources);
	return err;
}
