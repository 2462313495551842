/* SPDX-License-Identifier: MIT */
/* Loads the file into memory. Everything is validated as if an attacker had written it. */
#include <endian.h>
#include <errno.h>
#include <inttypes.h>
#include <isa-l/crc.h>
#include <stdlib.h>
#include <string.h>

#include "base/array.h"
#include "base/json_text.h"
#include "base/size.h"
#include "content/store/internal.h"

uint32_t store_mapping_sum(uint64_t offset, uint64_t length, uint64_t source,
			   uint64_t source_offset)
{
	const uint64_t row[] = { htole64(offset), htole64(length), htole64(source),
				 htole64(source_offset) };

	return crc32_gzip_refl(0, (const unsigned char *)row, sizeof(row));
}

int store_reserve_sources(struct store *store, uint64_t count)
{
	return array_reserve(store->sources, store->source_room, store->source_count + count);
}

/* What is not as it should be, or could not be had for want of memory. */
static int damaged(const struct store *store, const char *what, uint64_t number,
		   struct error *error)
{
	if (sqlite3_errcode(store->reader) == SQLITE_NOMEM)
		return error_set(error, -ENOMEM, "no memory to read map '%s'", store->path);
	return error_set(error, -EUCLEAN, "map '%s' is damaged: %s %" PRIu64 " is invalid",
			 store->path, what, number);
}

/* Makes the source of a row, with its number and key. */
static int load_source(struct store *store, sqlite3_stmt *row, struct error *error)
{
	uint64_t id = (uint64_t)sqlite3_column_int64(row, 0);
	const char *text = (const char *)sqlite3_column_text(row, 1);
	uint64_t losses = json_text_losses();
	json_t *keys = text ? json_text_parse(text, strlen(text), JSON_REJECT_DUPLICATES, NULL) :
			      NULL;
	struct source *source = NULL;
	int err;

	if (json_text_losses() != losses)
		return error_set(error, -ENOMEM, "no memory for a source");
	if (id != store->source_count + 1 || !keys ||
	    sqlite3_column_bytes(row, 2) != SOURCE_KEY_BYTES) {
		json_decref(keys);
		return damaged(store, "source", id, error);
	}
	err = store_load_caches(store, id, keys);
	if (!err)
		err = store_parse_source(keys, &source, error);
	json_decref(keys);
	if (!err && json_text_losses() != losses)
		err = error_set(error, -ENOMEM, "no memory for a source");
	if (!err)
		err = store_reserve_sources(store, 1);
	if (err) {
		source_free(source);
		error_set_hint(error, "this is source %" PRIu64 " of map '%s'", id, store->path);
		return err;
	}
	source->id = id;
	source->has_digests = sqlite3_column_type(row, 3) != SQLITE_NULL;
	memcpy(source->key, sqlite3_column_blob(row, 2), SOURCE_KEY_BYTES);
	store->sources[store->source_count++] = source;
	return store_load_index(store, source, error);
}

static int load_identity(struct store *store, sqlite3_stmt *row, struct error *error)
{
	uint64_t id = (uint64_t)sqlite3_column_int64(row, 0);
	uint64_t mirror = (uint64_t)sqlite3_column_int64(row, 1);
	const char *identity = (const char *)sqlite3_column_text(row, 2);
	struct source *source = id - 1 < store->source_count ? store->sources[id - 1] : NULL;

	if (!source || mirror >= source->mirror_count || !identity)
		return damaged(store, "the mirrors' identity of source", id, error);
	source->mirrors[mirror].identity = strdup(store_identity_of(identity));
	return source->mirrors[mirror].identity ? 0 : -ENOMEM;
}

/* Applies the same rules as adding does. */
static bool makes_sense(const struct store *store, const uint64_t row[static 4])
{
	uint64_t end;

	if (row[2] - 1 >= store->source_count || !row[1] ||
	    (row[0] | row[1] | row[3]) % BLOCK_BYTES)
		return false;
	if (row[0] > INT64_MAX - row[1] || __builtin_add_overflow(row[3], row[1], &end))
		return false;
	return end <= round_up_u64(store->sources[row[2] - 1]->size, BLOCK_BYTES);
}

/* Tells whether the mapping is of a request that did not end. They come in order. */
static bool is_of_unfinished(struct unfinished *unfinished, uint64_t offset)
{
	while (unfinished->count && (*unfinished->runs)[1] < offset) {
		unfinished->runs++;
		unfinished->count--;
	}
	return unfinished->count && (*unfinished->runs)[0] <= offset;
}

static int load_mapping(struct store *store, sqlite3_stmt *row, struct error *error)
{
	const struct mapping *conflict;
	uint64_t numbers[5];
	int err;

	for (int i = 0; i < 5; i++)
		numbers[i] = (uint64_t)sqlite3_column_int64(row, i);
	if (is_of_unfinished(&store->unfinished, numbers[0]))
		return 0;
	if (!makes_sense(store, numbers) ||
	    numbers[4] != store_mapping_sum(numbers[0], numbers[1], numbers[2], numbers[3]))
		return damaged(store, "the mapping at", numbers[0], error);
	err = map_add(store->map,
		      &(struct mapping){
			      .offset = numbers[0],
			      .length = numbers[1],
			      .source = store->sources[numbers[2] - 1],
			      .source_offset = numbers[3],
		      },
		      &conflict);
	return err == -EEXIST ? damaged(store, "the mapping at", numbers[0], error) : err;
}

static int for_rows(struct store *store, const char *query,
		    int (*load)(struct store *, sqlite3_stmt *, struct error *),
		    struct error *error)
{
	_cleanup_sql_ sqlite3_stmt *statement = NULL;
	int err = sql_prepare(store->reader, query, &statement);

	if (err)
		return sql_error_set(store->reader, "read", error);
	sql_bind(statement, "i", store->unfinished.sources);
	for (;;) {
		err = sql_step(statement);
		if (!err)
			return 0;
		if (err < 0)
			return sql_error_set(store->reader, "read", error);
		err = load(store, statement, error);
		if (err)
			return error_set(error, err, "cannot load map '%s': %s", store->path,
					 strerror(-err));
	}
}

static int load_all(struct store *store, struct error *error)
{
	int err = for_rows(store,
			   "SELECT id, text, key, list FROM sources WHERE id <= ?1 ORDER BY id",
			   load_source, error);

	if (!err)
		err = for_rows(store,
			       "SELECT source, mirror, identity FROM identities"
			       " WHERE source <= ?1",
			       load_identity, error);
	if (!err)
		err = for_rows(store,
			       "SELECT offset, length, source, source_offset, sum FROM mappings"
			       " ORDER BY offset",
			       load_mapping, error);
	return err;
}

int store_load(struct store *store, struct error *error)
{
	uint64_t(*runs)[2];
	int err = store_look_for_caches(store);

	if (!err)
		err = store_find_unfinished(store->reader, &store->unfinished);
	if (err) {
		err = sql_error_set(store->reader, "read", error) ?: err;
		return error_set(error, err, "cannot read the map: %s", strerror(-err));
	}
	runs = store->unfinished.runs;
	store->slices.is_unfinished = store->unfinished.sources != INT64_MAX;
	err = load_all(store, error);
	free(runs);
	return err;
}
