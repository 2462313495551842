/* SPDX-License-Identifier: MIT */
/*
 * map-list returns `"mappings"` of [`"from"`, `"to"`), a page at a time, and `"next"`, where to go
 * on, or null. map-show returns the mapping at `"offset"` and its source, or the source of a given
 * number. map-sources returns all sources from number `"from"` on, in pages too. The `"key"` of a
 * source is the name of its content in the cache.
 */
#include <errno.h>

#include "base/hex.h"
#include "base/keys.h"
#include "content/cache.h"
#include "content/layout.h"
#include "server/request/request.h"

enum { PAGE_MAPPINGS = 500, PAGE_SOURCES = 200 };

static int list_page(struct map_request *request, uint64_t from, uint64_t to)
{
	const struct mapping *mapping = map_next(request->space->map, from);
	json_t *list = json_array(), *next;

	if (json_object_set_new(request->body, "mappings", list))
		return -ENOMEM;
	for (; mapping && mapping->offset < to && json_array_size(list) < PAGE_MAPPINGS;
	     mapping = map_next(request->space->map, from)) {
		if (json_array_append_new(list, map_mapping_json(mapping)))
			return -ENOMEM;
		from = mapping->offset + mapping->length;
	}
	next = mapping && mapping->offset < to ? json_integer((json_int_t)mapping->offset) :
						 json_null();
	return json_object_set_new(request->body, "next", next) ? -ENOMEM : 0;
}

static int list(struct map_request *request)
{
	uint64_t from, to;
	int err = map_request_take_range(request, &from, &to);

	if (!err)
		err = keys_refuse_unknown(request->keys, &request->error);
	return err ?: list_page(request, from, to);
}

MAP_REQUEST(map_list_kind, "map-list", list);

static uint64_t count_cached(const struct map_request *request, const struct source *source)
{
	const struct cache_object *object = request->space->cache ? cache_object_of(source) : NULL;
	uint64_t count = 0, units = object ? source_units(source) : 0;

	for (uint64_t unit = 0; unit < units && !control_call_is_over(request->call); unit++)
		count += cache_has(object, unit, unit);
	return count;
}

static json_t *source_json(const struct map_request *request, const struct source *source)
{
	char key[2 * SOURCE_KEY_BYTES + 1];

	hex_encode(source->key, SOURCE_KEY_BYTES, key);
	return json_pack("{s:I, s:I, s:s, s:s, s:o}", "id", (json_int_t)source->id, "size",
			 (json_int_t)source->size, "digests", map_digests_of(source), "key", key,
			 "description", store_source_json(request->space->store, source));
}

static int show_source(const struct map_request *request, const struct source *source)
{
	json_t *about = source_json(request, source);
	int64_t pinned;

	if (!about || json_object_set_new(request->body, "source", about))
		return -ENOMEM;
	if (source->computed)
		return 0;
	pinned = store_pin_count(request->space->store, source);
	if (pinned < 0)
		return (int)pinned;
	json_object_set_new(about, "units", json_integer((json_int_t)source_units(source)));
	json_object_set_new(about, "pinned_units", json_integer(pinned));
	json_object_set_new(about, "cached_units",
			    json_integer((json_int_t)count_cached(request, source)));
	return 0;
}

static int show(struct map_request *request)
{
	uint64_t offset = UINT64_MAX, id = 0;
	const struct mapping *mapping = NULL;
	const struct source *source = NULL;
	int err = keys_take_u64(request->keys, "offset", false, &offset, &request->error);

	if (!err)
		err = keys_take_u64(request->keys, "source", false, &id, &request->error);
	if (!err)
		err = keys_refuse_unknown(request->keys, &request->error);
	if (err)
		return err;
	if ((offset == UINT64_MAX) == !id)
		return error_set(&request->error, -EINVAL,
				 "one of \"offset\" and \"source\" is needed");
	if (id)
		source = store_source(request->space->store, id);
	else
		mapping = map_find(request->space->map, offset);
	if (id && !source)
		return error_set(&request->error, -ENOENT, "the map has no source %llu",
				 (unsigned long long)id);
	if (!id && !mapping)
		return error_set(&request->error, -ENOENT, "nothing is mapped at %llu",
				 (unsigned long long)offset);
	if (mapping && json_object_set_new(request->body, "mapping", map_mapping_json(mapping)))
		return -ENOMEM;
	return show_source(request, mapping ? mapping->source : source);
}

MAP_REQUEST(map_show_kind, "map-show", show);

static int list_sources(struct map_request *request)
{
	uint64_t from = 1, end_ns = map_request_page_end_ns();
	int err = keys_take_u64(request->keys, "from", false, &from, &request->error);
	json_t *list = json_array();
	const struct source *source = NULL;

	if (!err)
		err = keys_refuse_unknown(request->keys, &request->error);
	if (json_object_set_new(request->body, "sources", list))
		return -ENOMEM;
	for (; !err && (source = store_source(request->space->store, from)) != NULL; from++) {
		if (json_array_size(list) >= PAGE_SOURCES || clock_now_ns() > end_ns)
			break;
		if (json_array_append_new(list, source_json(request, source)))
			err = -ENOMEM;
	}
	if (err)
		return err;
	return json_object_set_new(request->body, "next",
				   source ? json_integer((json_int_t)from) : json_null()) ?
		       -ENOMEM :
		       0;
}

MAP_REQUEST(map_sources_kind, "map-sources", list_sources);
