/* SPDX-License-Identifier: MIT */
/*
 * Adds mappings, all or none. First, sources are found and offsets chosen, which takes no
 * transaction. Then all is written (slices.c). Everything that can fail happens before the last
 * commit; after it, the map in memory is updated from memory that was reserved.
 */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/cleanup.h"
#include "base/json_text.h"
#include "base/relaxed.h"
#include "base/size.h"
#include "content/store/internal.h"

/* Sources, while pins wait. */
enum { FOUND_AT_ONCE = 100 };

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
	struct store_addition **first; /* those that are the first of their source */
	size_t used;		       /* how many sources are */
	/* Of the sources that are new by their names; of mappings, where their offsets are chosen. */
	struct table names, same;
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
	size = addition->source_size = source_of(request, addition)->size;
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

static bool may_be_chosen(const struct store_room *room, uint64_t offset, uint64_t length)
{
	return offset >= room->start && length <= room->end && offset <= room->end - length &&
	       !(offset % room->alignment);
}

struct wanted {
	const struct request *request;
	const struct mapping *mapping; /* at any offset */
};

static bool is_as_wanted(const void *argument, uint64_t offset)
{
	const struct wanted *wanted = argument;
	const struct mapping *found = map_find(wanted->request->store->map, offset) ?:
					      map_find(wanted->request->batch, offset);

	return found && found->source == wanted->mapping->source &&
	       found->source_offset == wanted->mapping->source_offset &&
	       found->length == wanted->mapping->length;
}

static uint64_t *find_same(const struct request *request, const struct mapping *mapping)
{
	const struct wanted wanted = { request, mapping };
	const uint64_t hash = table_hash(table_hash(mapping->source->id, mapping->source_offset),
					 mapping->length);

	return table_find(&request->same, hash, is_as_wanted, &wanted);
}

/* So that the next addition of the same, which leaves its offset open, gets the lowest that is there. */
static int note_same(struct request *request, const struct mapping *mapping)
{
	uint64_t *offset;
	int err;

	if (!request->same.slots || !may_be_chosen(request->room, mapping->offset, mapping->length))
		return 0;
	err = table_reserve(&request->same);
	if (err)
		return error_set(request->error, err, "no memory for mappings");
	offset = find_same(request, mapping);
	if (mapping->offset < *offset)
		*offset = mapping->offset;
	return 0;
}

/*
 * Notes the mappings of sources that the request has, so that a request whose reply was lost can be
 * repeated. Does nothing if the request leaves no offset open.
 */
static int note_known(struct request *request)
{
	const struct store *store = request->store;
	const struct store_room *room = request->room;
	_cleanup_free_ bool *has = calloc(store->source_count + 1, sizeof(*has));
	bool any = false, is_open = false;
	const struct mapping *mapping;
	int err = 0;

	for (size_t i = 0; i < request->count && !is_open; i++)
		is_open = request->additions[i].offset == STORE_ANYWHERE;
	if (!is_open || !room || !room->alignment || room->end > INT64_MAX)
		return 0;
	if (!has || table_init(&request->same))
		return error_set(request->error, -ENOMEM, "no memory for mappings");
	for (size_t i = 0; i < request->source_count; i++) {
		if (!request->sources[i].known)
			continue;
		has[request->sources[i].known->id] = any = true;
	}
	mapping = any ? map_next(store->map, 0) : NULL;
	for (; mapping && !err; mapping = map_after(store->map, mapping)) {
		if (has[mapping->source->id])
			err = note_same(request, mapping);
	}
	return err;
}

static int choose_offset(struct request *request, struct store_addition *addition,
			 struct source *source)
{
	const struct store_room *room = request->room;
	const struct mapping wanted = {
		.length = addition->length,
		.source = source,
		.source_offset = addition->source_offset,
	};
	char length[SIZE_TEXT_BYTES];

	if (!room || !room->alignment || room->alignment % BLOCK_BYTES ||
	    room->alignment > INT64_MAX)
		return error_set(request->error, -EINVAL,
				 "the alignment is %" PRIu64 ", it must be a multiple of %u",
				 room ? room->alignment : 0, BLOCK_BYTES);
	if (room->start <= room->end && room->end - room->start >= addition->length &&
	    room->end <= INT64_MAX) {
		addition->offset = *find_same(request, &wanted);
		if (addition->offset != TABLE_FREE ||
		    find_room(request, addition, &addition->offset))
			return 0;
	}
	error_set_hint(request->error, "the device is too small for more, or the room that was "
				       "asked for is");
	return error_set(request->error, -ENOSPC,
			 "no %s are free from %" PRIu64 " to %" PRIu64 " on a multiple of %" PRIu64,
			 size_format(addition->length, length), room->start, room->end,
			 room->alignment);
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
	return err ? error_set(request->error, err, "no memory for mappings") :
		     note_same(request, &mapping);
}

struct wanted_name {
	const struct request *request;
	const uint8_t *name;
};

static bool has_name(const void *argument, uint64_t index)
{
	const struct wanted_name *wanted = argument;

	return !memcmp(wanted->request->sources[index].name, wanted->name, NAME_BYTES);
}

/* A source that the request describes twice is the first of the two. */
static int number_source(struct request *request, struct new_source *made)
{
	const struct wanted_name wanted = { request, made->name };
	const struct new_source *first;
	uint64_t hash, *index;
	int err;

	if (table_reserve(&request->names))
		return error_set(request->error, -ENOMEM, "no memory for sources");
	err = new_source_check_index(made, request->error);
	if (err)
		return err;
	memcpy(&hash, made->name, sizeof(hash));
	index = table_find(&request->names, hash, has_name, &wanted);
	if (*index == TABLE_FREE) {
		*index = (uint64_t)(made - request->sources);
		made->source->id = request->store->source_count + ++request->new_sources;
	}
	first = &request->sources[*index];
	made->known = first->source;
	made->id = first->source->id;
	return 0;
}

/* Unmapped sources do not come into the map. */
static int take_source(struct request *request, struct store_addition *addition,
		       struct source **source)
{
	struct new_source *made = &request->sources[addition->source];
	int err = 0;

	if (!made->is_used) {
		err = made->known ? 0 : number_source(request, made);
		made->is_used = true;
		request->first[request->used++] = addition;
	}
	*source = made->known;
	return err;
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

static int choose(struct request *request, struct store_addition *addition)
{
	struct source *source;
	int err;

	if (is_of_nothing(request, addition))
		return 0;
	err = check_addition(request, addition);
	if (!err)
		err = take_source(request, addition, &source);
	if (!err && addition->offset == STORE_ANYWHERE)
		err = choose_offset(request, addition, source);
	if (!err)
		err = place(request, addition, source);
	return err ? blame(request, addition, err) : 0;
}

static int choose_all(struct request *request)
{
	int err = 0;

	request->batch = map_new();
	request->first = calloc(request->source_count ?: 1, sizeof(struct store_addition *));
	if (!request->batch || !request->first || table_init(&request->names))
		return error_set(request->error, -ENOMEM, "no memory for mappings");
	for (size_t i = 0; i < request->source_count && !err; i += FOUND_AT_ONCE) {
		size_t left = request->source_count - i;

		err = is_over(request) ?
			      -ECANCELED :
			      new_sources_find(request->store, &request->sources[i],
					       left < FOUND_AT_ONCE ? left : FOUND_AT_ONCE,
					       request->error);
	}
	if (!err)
		err = note_known(request);
	for (size_t i = 0; i < request->count && !err; i++)
		err = is_over(request) ? -ECANCELED : choose(request, &request->additions[i]);
	return err;
}

static int write_sources(const struct request *request)
{
	for (size_t i = 0; i < request->used; i++) {
		struct store_addition *addition = request->first[i];
		int err = new_source_store(request->store, &request->sources[addition->source],
					   request->error);

		if (err)
			return blame(request, addition, err);
	}
	return 0;
}

static int write_mappings(const struct request *request)
{
	_cleanup_sql_ sqlite3_stmt *insert = NULL;
	const struct mapping *mapping = map_next(request->batch, 0);
	int err = sql_prepare(request->store->writer,
			      "INSERT INTO mappings VALUES(?1, ?2, ?3, ?4, ?5)", &insert);

	for (; mapping && !err; mapping = map_after(request->batch, mapping)) {
		const uint64_t row[] = { mapping->offset, mapping->length, mapping->source->id,
					 mapping->source_offset };
		uint64_t sum = store_mapping_sum(row[0], row[1], row[2], row[3]);

		sql_bind(insert, "iiiii", row[0], row[1], row[2], row[3], sum);
		err = sql_do(insert) ?: slice_pass(request->store, sizeof(row));
	}
	return err ? sql_error_set(request->store->writer, "write to", request->error) ?: err : 0;
}

static int write_all(const struct request *request)
{
	struct store *store = request->store;
	int err = slice_begin(store, request->batch, request->over);

	if (err)
		sql_error_set(store->writer, "write to", request->error);
	else
		err = write_sources(request);
	if (!err)
		err = write_mappings(request);
	if (!err && (json_text_losses() != request->losses ||
		     store_reserve_sources(store, request->new_sources) ||
		     map_reserve(store->map, map_count(request->batch))))
		err = error_set(request->error, -ENOMEM, "no memory for mappings");
	return slice_end(store, err, request->error);
}

/* Nothing here can fail. */
static void publish(struct request *request)
{
	struct store *store = request->store;
	const struct mapping *conflict, *mapping = map_next(request->batch, 0);

	pthread_mutex_lock(&store->write_lock);
	store->source_count += request->new_sources;
	for (size_t i = 0; i < request->source_count; i++) {
		struct source *source = request->sources[i].source;

		if (!source || !source->id)
			continue;
		store->sources[source->id - 1] = source;
		request->sources[i].source = NULL;
	}
	pthread_mutex_unlock(&store->write_lock);
	for (; mapping; mapping = map_after(request->batch, mapping))
		map_add(store->map, mapping, &conflict);
}

/* One request at a time; pins and reads come in between. */
static int run(struct request *request)
{
	struct store *store = request->store;
	int err;

	pthread_mutex_lock(&store->add_lock);
	err = store_undo(store, request->error);
	if (!err)
		err = choose_all(request);
	if (!err)
		err = write_all(request);
	if (!err)
		publish(request);
	pthread_mutex_unlock(&store->add_lock);
	map_free(request->batch);
	free(request->first);
	table_deinit(&request->names);
	table_deinit(&request->same);
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
	if (err == -ENOMEM)
		error_set_text(error, "no memory for mappings"); /* unless that was said already */
	for (size_t i = 0; i < request.source_count; i++)
		new_source_deinit(&request.sources[i]);
	free(request.sources);
	return err;
}
