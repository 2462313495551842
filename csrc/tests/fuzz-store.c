/* SPDX-License-Identifier: MIT */
/*
 * fuzz-store OBJECT: the bytes of a map file are changed, or the values in its tables, and it is
 * opened. Either it is refused with a reason, or what it has makes sense. The object is compressed,
 * and OBJECT.index is its index.
 */
#include <errno.h>
#include <inttypes.h>
#include <sqlite3.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/cleanup.h"
#include "lazy/codec_index.h"
#include "lazy/store.h"
#include "lazy/store/internal.h"
#include "tests/files.h"

enum { CHANGES_MAX = 8, MAPPINGS = 3 };

static struct fuzz_files files;
static char map_path[512];

static void look_at_source(struct store *store, struct source *source)
{
	uint8_t digest[SOURCE_DIGEST_BYTES], window[CODEC_WINDOW_BYTES];
	char *identity = NULL;
	uint32_t bytes;

	json_decref(store_source_json(store, source));
	for (uint64_t unit = 0; unit < 3; unit++) {
		(void)store_digest(store, source, unit, digest);
		(void)store_digest_at_hand(store, source, unit, digest);
	}
	(void)store_pin_count(store, source);
	if (store_identity(store, source, 0, &identity) > 0)
		free(identity);
	for (uint64_t point = 0; source->index && point < source->index->count && point < 4;
	     point++)
		(void)store_window(store, source, point, window, &bytes);
	(void)store_pin_digest(store, source, 2, digest);
}

static void look(void)
{
	struct map *map = map_new();
	struct store *store = NULL;
	struct error error = {};
	int err;

	fuzz_require(map, "no memory");
	err = store_open(map_path, map, &store, &error);
	fuzz_require(!err || *error.text, "refused without a reason");
	if (!err) {
		for (uint64_t id = 1; id <= store_source_count(store); id++)
			look_at_source(store, store_source(store, id));
		(void)store_check(store, &error);
		store_close(store);
	}
	map_free(map);
}

static uint64_t count_of(sqlite3 *db, const char *text)
{
	sqlite3_stmt *statement = NULL;
	uint64_t count = 0;

	if (!sqlite3_prepare_v2(db, text, -1, &statement, NULL) &&
	    sqlite3_step(statement) == SQLITE_ROW)
		count = (uint64_t)sqlite3_column_int64(statement, 0);
	sqlite3_finalize(statement);
	return count;
}

/* A number, a text or bytes in one column of one row. */
static void change_row(sqlite3 *db, struct fuzz_input *input)
{
	static const char *const columns[][2] = {
		{ "sources", "text" },	      { "sources", "key" },
		{ "sources", "list" },	      { "sources", "id" },
		{ "mappings", "offset" },     { "mappings", "length" },
		{ "mappings", "source" },     { "mappings", "source_offset" },
		{ "mappings", "sum" },	      { "digests", "page" },
		{ "digests", "list" },	      { "identities", "mirror" },
		{ "identities", "identity" }, { "identities", "source" },
		{ "layouts", "part" },	      { "layouts", "page" },
		{ "windows", "window" },      { "windows", "point" },
		{ "pins", "unit" },	      { "pins", "digest" },
	};
	static const int64_t numbers[] = {
		0, 1, 2, -1, 4096, 8192, INT64_MAX, INT64_MIN, 1ll << 32
	};
	uint64_t which = fuzz_take(input, 1) % (sizeof(columns) / sizeof(*columns));
	const char *table = columns[which][0], *column = columns[which][1];
	uint64_t row = fuzz_take(input, 1), how = fuzz_take(input, 1);
	char text[256], count[64];
	uint64_t rows;

	snprintf(count, sizeof(count), "SELECT count(*) FROM %s", table);
	rows = count_of(db, count);
	if (!rows)
		return;
	if (how % 8 == 0) {
		snprintf(text, sizeof(text),
			 "UPDATE %s SET %s = %" PRId64
			 " WHERE %s IN (SELECT %s FROM %s LIMIT 1 OFFSET %" PRIu64 ")",
			 table, column, numbers[fuzz_take(input, 1) % 9], column, column, table,
			 row % rows);
	} else if (how % 8 == 1) {
		snprintf(text, sizeof(text),
			 "DELETE FROM %s WHERE %s IN (SELECT %s FROM %s LIMIT 1 OFFSET %" PRIu64
			 ")",
			 table, column, column, table, row % rows);
	} else {
		/* Bytes of what is there: cut, or replaced. */
		uint64_t at = fuzz_take(input, 2), value = fuzz_take(input, 1);
		bool is_text = !strcmp(column, "text") || !strcmp(column, "identity");

		snprintf(text, sizeof(text),
			 "UPDATE %s SET %s = CAST(substr(CAST(%s AS BLOB), 1, %" PRIu64
			 ") || x'%02x' || substr(CAST(%s AS BLOB), %" PRIu64 ") AS %s)",
			 table, column, column, at % 512, (unsigned)value, column,
			 at % 512 + 1 + how % 3, is_text ? "TEXT" : "BLOB");
	}
	(void)sqlite3_exec(db, text, NULL, NULL, NULL);
}

static void change_rows(struct fuzz_input *input)
{
	sqlite3 *db = NULL;

	if (sqlite3_open(map_path, &db))
		abort();
	sqlite3_exec(db, "PRAGMA synchronous = OFF; BEGIN", NULL, NULL, NULL);
	for (unsigned i = 0; i < CHANGES_MAX && input->length; i++)
		change_row(db, input);
	sqlite3_exec(db, "COMMIT", NULL, NULL, NULL);
	/* As a closed map is. */
	sqlite3_exec(db, "PRAGMA wal_checkpoint(TRUNCATE)", NULL, NULL, NULL);
	sqlite3_close(db);
}

static void run(const uint8_t *data, size_t length)
{
	struct fuzz_input input = { data, length };

	fuzz_files_restore(&files);
	if (fuzz_take(&input, 1) % 4)
		change_rows(&input);
	for (unsigned i = 0; i < CHANGES_MAX && input.length; i++)
		fuzz_files_change(&files, &input);
	look();
}

static void make_map(const char *object)
{
	json_t *sources = json_array();
	struct store_addition additions[MAPPINGS] = {
		{ .offset = 0, .length = 8192 },
		{ .offset = 16384, .length = 4096, .source_offset = 8192, .source = 1 },
		{ .offset = 1 << 20, .length = 65536, .source = 2 },
	};
	uint8_t digest[SOURCE_DIGEST_BYTES] = { 1 };
	struct map *map = map_new();
	struct store *store = NULL;
	struct error error = {};
	char digests[3 * 64 + 1];
	char index[4096];
	int err;

	memset(digests, 'a', sizeof(digests) - 1);
	digests[sizeof(digests) - 1] = 0;
	snprintf(index, sizeof(index), "%s.index", object);
	json_array_append_new(sources, json_pack("{s:s, s:s, s:i, s:i}", "kind", "file", "path",
						 "/nowhere", "size", 10000, "unit", 4096));
	json_array_append_new(sources,
			      json_pack("{s:i, s:i, s:[{s:s, s:s, s:[s]}, {s:s, s:s}]}", "size",
					100000, "unit", 4096, "mirrors", "kind", "http", "url",
					"http://127.0.0.1:1/a", "via", "http://127.0.0.1:2", "kind",
					"http", "url", "http://127.0.0.1:1/b"));
	json_array_append_new(sources, json_pack("{s:s, s:s, s:i, s:s, s:{s:s}}", "kind", "file",
						 "path", object, "unit", 65536, "codec", "gzip",
						 "index", "path", index));
	err = store_open(map_path, map, &store, &error);
	if (!err)
		err = store_add(store, sources, additions, MAPPINGS, NULL, NULL, &error);
	if (!err)
		err = store_pin_digest(store, store_source(store, 1), 1, digest);
	if (!err)
		err = store_pin_identity(store, &store_source(store, 2)->mirrors[0], "\"x\"");
	if (err) {
		fprintf(stderr, "fuzz-store: %s\n", error.text);
		abort();
	}
	json_decref(sources);
	store_close(store);
	map_free(map);
}

static void begin(const char *path)
{
	fuzz_files_make(&files);
	fuzz_files_path(&files, "map", map_path);
	make_map(path);
	fuzz_files_keep(&files);
}

static void end(void)
{
	fuzz_files_remove(&files);
}

static const struct fuzzer fuzzer = {
	.name = "fuzz-store",
	.what = "OBJECT",
	.input_bytes = 1 + CHANGES_MAX * 13,
	.begin = begin,
	.run = run,
	.end = end,
};
FUZZ_PROGRAM(fuzzer)
