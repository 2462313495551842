/* SPDX-License-Identifier: MIT */
/*
 * map-add adds `"mappings"`, a list of [OFFSET or null, LENGTH, SOURCE, SOURCE_OFFSET], where
 * SOURCE is an index of `"sources"`, a list of descriptions. `"room"`: {"start", "end",
 * "alignment"} is where to find offsets for null. The reply has `"added"`: a list of [OFFSET,
 * EXISTED, LENGTH]; and `"sizes"`, of the sources of the first thousand of them.
 *
 * Many mappings come in a file, whose descriptor comes with the request, which then has `"in_file":
 * true`. The file has one JSON value per line: a list for a mapping, an object for a source. The
 * reply is written to the file: for each mapping 16 bytes, its offset, plus 1 if it existed, and
 * its length, little-endian; and then, as the reply's `"sizes"` says, 8 bytes for each, the size of
 * its source.
 */
#include <endian.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/array.h"
#include "base/cleanup.h"
#include "base/fileio.h"
#include "base/json_text.h"
#include "base/keys.h"
#include "base/size.h"
#include "server/request/request.h"

enum {
	MAPPINGS_MAX = 1 << 21,
	/* The reply to more might not fit into the socket of a client that does not read yet. */
	INLINE_MAX = 4096,
	SIZES_MAX = 1000,
};

#define FILE_BYTES_MAX MIB(256)

struct batch {
	json_t *sources;
	struct store_addition *additions;
	size_t count, room;
};

/* `null` is STORE_ANYWHERE. */
static int take_number(const json_t *number, bool may_be_null, uint64_t *value)
{
	if (json_is_null(number) && may_be_null) {
		*value = UINT64_MAX; /* STORE_ANYWHERE, STORE_REST */
		return 0;
	}
	if (!json_is_integer(number) || json_integer_value(number) < 0)
		return -EINVAL;
	*value = (uint64_t)json_integer_value(number);
	return 0;
}

static int grow(struct batch *batch)
{
	if (batch->count >= MAPPINGS_MAX)
		return -E2BIG;
	return array_reserve(batch->additions, batch->room, batch->count + 1);
}

static int take_mapping(struct batch *batch, const json_t *row, struct error *error)
{
	struct store_addition *addition;
	uint64_t source;
	int err = grow(batch);

	if (err)
		return error_set(error, err, "%zu mappings are too many at once", batch->count);
	addition = &batch->additions[batch->count];
	*addition = (struct store_addition){};
	if (json_array_size(row) != 4 ||
	    take_number(json_array_get(row, 0), true, &addition->offset) ||
	    take_number(json_array_get(row, 1), true, &addition->length) ||
	    take_number(json_array_get(row, 2), false, &source) ||
	    take_number(json_array_get(row, 3), false, &addition->source_offset)) {
		error_set_hint(error, "null may be an offset (the lowest one that is free) and a "
				      "length (the rest of the source)");
		return error_set(error, -EINVAL,
				 "mapping %zu (counted from 0) is not [OFFSET, LENGTH, SOURCE, "
				 "SOURCE_OFFSET], four numbers that are not negative",
				 batch->count);
	}
	addition->source = source > UINT32_MAX ? UINT32_MAX : (unsigned)source;
	batch->count++;
	return 0;
}

static int take_inline(struct map_request *request, struct batch *batch)
{
	json_t *sources = json_object_get(request->keys, "sources");
	json_t *mappings = json_object_get(request->keys, "mappings");
	const json_t *row;
	size_t i;
	int err = 0;

	if (!json_is_array(sources) || !json_is_array(mappings))
		return error_set(&request->error, -EINVAL,
				 "\"sources\" and \"mappings\" must be lists");
	if (json_array_size(mappings) > INLINE_MAX) {
		error_set_hint(&request->error, "put them into a file: \"in_file\"");
		return error_set(&request->error, -E2BIG,
				 "%zu mappings are too many for one line; the limit is %d",
				 json_array_size(mappings), INLINE_MAX);
	}
	json_array_foreach (mappings, i, row) {
		if (!err)
			err = take_mapping(batch, row, &request->error);
	}
	if (!err && json_array_extend(batch->sources, sources))
		err = -ENOMEM;
	json_object_del(request->keys, "sources");
	json_object_del(request->keys, "mappings");
	return err;
}

static int take_line(struct batch *batch, const char *line, size_t number, struct error *error)
{
	json_error_t json_error;
	json_t *value = json_text_parse(line, strlen(line), JSON_REJECT_DUPLICATES, &json_error);
	int err;

	if (json_is_object(value))
		return json_array_append_new(batch->sources, value) ? -ENOMEM : 0;
	if (json_is_array(value))
		err = take_mapping(batch, value, error);
	else
		err = error_set(error, -EINVAL,
				"line %zu is neither a source nor a mapping in JSON", number);
	json_decref(value);
	return err;
}

static int take_lines(FILE *file, struct batch *batch, const struct control_call *call,
		      struct error *error)
{
	_cleanup_free_ char *line = NULL;
	size_t room = 0, number = 0;
	int err = 0;

	while (!err && map_request_next_line(&line, &room, file, &err)) {
		err = take_line(batch, line, ++number, error);
		if (!err && control_call_is_over(call))
			err = -ECANCELED;
	}
	return err;
}

static int take_file(struct map_request *request, struct batch *batch)
{
	_cleanup_fclose_ FILE *file = NULL;
	int err = map_request_open_lines(request, FILE_BYTES_MAX, &file);

	return err ?: take_lines(file, batch, request->call, &request->error);
}

static int take_room(struct map_request *request, struct store_room *room)
{
	json_t *keys = json_incref(json_object_get(request->keys, "room"));
	int err = 0;

	*room = request->space->room;
	json_object_del(request->keys, "room");
	if (keys && !json_is_object(keys))
		err = error_set(&request->error, -EINVAL, "\"room\" must be an object");
	if (keys && !err)
		err = keys_take_u64(keys, "start", false, &room->start, &request->error);
	if (keys && !err)
		err = keys_take_u64(keys, "end", false, &room->end, &request->error);
	if (keys && !err)
		err = keys_take_u64(keys, "alignment", false, &room->alignment, &request->error);
	if (keys && !err)
		err = keys_refuse_unknown(keys, &request->error);
	json_decref(keys);
	if (room->start < room->shown_start)
		room->start = room->shown_start;
	if (room->end > room->shown_end)
		room->end = room->shown_end;
	return err;
}

static int answer_inline(const struct map_request *request, const struct batch *batch)
{
	json_t *list = json_array(), *sizes = json_array();
	int err = json_object_set_new(request->body, "added", list);

	err |= json_object_set_new(request->body, "sizes", sizes);
	for (size_t i = 0; i < batch->count && !err; i++) {
		const struct store_addition *addition = &batch->additions[i];

		err = json_array_append_new(
			list, json_pack("[I, b, I]", (json_int_t)addition->offset,
					(int)addition->existed, (json_int_t)addition->length));
		if (i < SIZES_MAX)
			err |= json_array_append_new(
				sizes, json_integer((json_int_t)addition->source_size));
	}
	return err ? -ENOMEM : 0;
}

static int answer_in_file(const struct map_request *request, const struct batch *batch)
{
	_cleanup_free_ uint64_t *words = calloc(batch->count ?: 1, 3 * sizeof(*words));
	size_t existed = 0;
	int err;

	if (!words)
		return -ENOMEM;
	for (size_t i = 0; i < batch->count; i++) {
		const struct store_addition *addition = &batch->additions[i];

		words[2 * i] = htole64(addition->offset | addition->existed);
		words[2 * i + 1] = htole64(addition->length);
		words[2 * batch->count + i] = htole64(addition->source_size);
		existed += addition->existed;
	}
	err = pwrite_full(request->call->fd, words, batch->count * 3 * sizeof(*words), 0);
	if (err)
		return err;
	return json_object_set_new(request->body, "count",
				   json_integer((json_int_t)batch->count)) ||
			       json_object_set_new(request->body, "existed",
						   json_integer((json_int_t)existed)) ||
			       json_object_set_new(request->body, "sizes", json_true()) ?
		       -ENOMEM :
		       0;
}

static int add_batch(struct map_request *request, struct batch *batch)
{
	struct error *error = &request->error;
	struct store_room room;
	bool in_file = false;
	int err = keys_take_bool(request->keys, "in_file", &in_file, error);

	if (!err)
		err = take_room(request, &room);
	if (!err)
		err = in_file ? take_file(request, batch) : take_inline(request, batch);
	if (!err)
		err = keys_refuse_unknown(request->keys, error);
	if (!err)
		err = store_add(request->space->store, batch->sources, batch->additions,
				batch->count, &room, &request->call->over, error);
	if (err)
		return err;
	/*
	 * NB: the mappings are added even if the reply cannot be made; a repeated request gets it.
	 */
	return in_file ? answer_in_file(request, batch) : answer_inline(request, batch);
}

static int add(struct map_request *request)
{
	struct batch batch = { .sources = json_array() };
	int err = batch.sources ? add_batch(request, &batch) : -ENOMEM;

	json_decref(batch.sources);
	free(batch.additions);
	return err;
}

MAP_REQUEST(map_add_kind, "map-add", add);
