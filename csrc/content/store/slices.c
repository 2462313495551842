/* SPDX-License-Identifier: MIT */
/*
 * Requests in slices. A long transaction would hold up pins, and reads with them, so a large request
 * is written in several. The first one adds the table `unfinished`, which says what the map has
 * without the request, and the last one removes it: until then, nothing of the request counts. Who
 * finds that table leaves out what does not count (load.c), and removes it before anything is added.
 * Meanwhile the version is one that older servers refuse.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/array.h"
#include "base/cleanup.h"
#include "base/clock.h"
#include "base/relaxed.h"
#include "content/store/internal.h"

enum {
	SLICE_MS = 100,	  /* each slice waits for the disk */
	SLICE_MIN_MS = 2, /* while there are pins, so that not each row waits for the disk */
};

/*
 * The mappings of the batch as runs, between which the map has others: so they are no more than one
 * where all is new.
 */
static int list_runs(const struct store *store, const struct map *batch, struct unfinished *list)
{
	const struct mapping *mapping = map_next(batch, 0), *next = mapping;
	size_t room = 0;

	*list = (struct unfinished){ .sources = store->source_count };
	for (; mapping; mapping = map_after(batch, mapping)) {
		if (list->count && (!next || mapping->offset < next->offset)) {
			list->runs[list->count - 1][1] = mapping->offset;
			continue;
		}
		if (array_reserve(list->runs, room, list->count + 1))
			return -ENOMEM;
		list->runs[list->count][0] = list->runs[list->count][1] = mapping->offset;
		list->count++;
		next = map_next(store->map, mapping->offset);
	}
	return 0;
}

static int set_version(struct store *store, int version)
{
	char text[40];

	snprintf(text, sizeof(text), "PRAGMA user_version=%d", version);
	return sql_run(store->writer, text);
}

static int mark(struct store *store)
{
	const struct unfinished *begun = &store->slices.begun;
	int err = sql_run(store->writer, "CREATE TABLE unfinished("
					 " sources INTEGER NOT NULL, runs BLOB NOT NULL) STRICT");

	/* New rows are all over the index of names, so a small cache would write a page for each. */
	if (!err) {
		store->slices.has_large_cache = true;
		err = sql_run(store->writer, "PRAGMA cache_size=-8192");
	}
	if (!err)
		err = set_version(store, STORE_VERSION_UNFINISHED);
	return err   ?:
		       sql_run_with(store->writer, "INSERT INTO unfinished VALUES(?1, ?2)", "ib",
				    begun->sources, begun->runs,
				    begun->count * sizeof(*begun->runs));
}

/* No transaction takes it back, so a request that has failed does it too. Holds write_lock. */
static void shrink_cache(struct store *store)
{
	if (!store->slices.has_large_cache)
		return;
	store->slices.has_large_cache = false;
	(void)sql_run(store->writer, "PRAGMA cache_size=" STORE_CACHE_SIZE);
	sqlite3_db_release_memory(store->writer);
}

int store_find_unfinished(sqlite3 *db, struct unfinished *found)
{
	_cleanup_sql_ sqlite3_stmt *find = NULL;
	int err = store_has_table(db, "unfinished");
	size_t bytes;

	*found = (struct unfinished){ .sources = INT64_MAX };
	if (err <= 0)
		return err;
	err = sql_find(db, &find, "SELECT sources, runs FROM unfinished", "");
	if (err <= 0)
		return err ?: -EUCLEAN;
	found->sources = (uint64_t)sqlite3_column_int64(find, 0);
	bytes = (size_t)sqlite3_column_bytes(find, 1);
	if (bytes % sizeof(*found->runs))
		return -EUCLEAN;
	found->count = bytes / sizeof(*found->runs);
	found->runs = malloc(bytes + 1);
	if (!found->runs)
		return -ENOMEM;
	if (bytes)
		memcpy(found->runs, sqlite3_column_blob(find, 1), bytes);
	return 0;
}

static int begin(struct store *store)
{
	struct slices *slices = &store->slices;

	slices->until_ns = clock_now_ns() + SLICE_MS * NS_PER_MS;
	slices->bytes = 0;
	return store_begin(store);
}

int slice_begin(struct store *store, const struct map *batch, const bool *over)
{
	struct slices *slices = &store->slices;

	slices->over = over;
	slices->err = list_runs(store, batch, &slices->begun);
	store_lock_after_pins(store);
	return slices->err ?: begin(store);
}

static bool is_long_enough(const struct store *store)
{
	const struct slices *slices = &store->slices;
	bool has_pins = relaxed_load(&store->pins.has_leader);
	uint64_t spare_ns = has_pins ? (SLICE_MS - SLICE_MIN_MS) * NS_PER_MS : 0;

	return slices->bytes >= slices->most_bytes || clock_now_ns() + spare_ns >= slices->until_ns;
}

int slice_pass(struct store *store, uint64_t bytes)
{
	struct slices *slices = &store->slices;
	int err = slices->err;

	slices->bytes += bytes;
	if (err || !is_long_enough(store))
		return err;
	if (slices->over && relaxed_load(slices->over))
		err = -ECANCELED;
	if (!err && !slices->is_unfinished)
		err = mark(store);
	if (!err)
		err = store_commit(store);
	if (!err) {
		slices->is_unfinished = true;
		pthread_mutex_unlock(&store->write_lock);
		store_lock_after_pins(store);
		err = begin(store);
	}
	slices->err = err;
	return err;
}

/* In the last transaction of a request, or of what removes it. */
static int finish(struct store *store)
{
	int coded = store_has_table(store->writer, "layouts"), err = coded < 0 ? coded : 0;
	int version = coded ? STORE_VERSION_CODED : STORE_VERSION;
	sqlite3_int64 present = 0;

	if (!err && store->slices.is_unfinished)
		err = sql_run(store->writer, "DROP TABLE unfinished");
	if (!err)
		err = sql_number(store->writer, "PRAGMA user_version", &present);
	if (!err && present != version)
		err = set_version(store, version);
	if (!err)
		err = store_commit(store);
	if (!err)
		store->slices.is_unfinished = false;
	return err;
}

int slice_end(struct store *store, int err, struct error *error)
{
	err = err ?: store->slices.err;
	if (!err) {
		err = finish(store);
		if (err)
			sql_error_set(store->writer, "write to", error);
	}
	if (err)
		store_rollback(store);
	if (!store->slices.is_unfinished)
		shrink_cache(store);
	pthread_mutex_unlock(&store->write_lock);
	free(store->slices.begun.runs);
	if (err)
		store_undo(store, &(struct error){});
	return err;
}

/* Undoing removes new mappings by their runs, and from other tables the rows of new sources. */
static const struct removal {
	const char *table, *key;
	unsigned shift, at_once;
} removals[] = {
	{ "mappings", "offset", 0, 500 },
	{ "digests", "page", DIGEST_PAGE_BITS, 100 },
	{ "layouts", "page", DIGEST_PAGE_BITS, 100 },
	{ "windows", "point", DIGEST_PAGE_BITS, 50 },
	{ "selections", "page", DIGEST_PAGE_BITS, 100 },
	{ "pieces", "unit", DIGEST_PAGE_BITS, 50 },
	{ "identities", "source", 0, 500 },
	{ "caches", "source", 0, 500 },
	{ "unsized", "source", 0, UINT32_MAX }, /* which has no index of these */
	{ "sources", "id", 0, 500 },
};

static int remove_range(struct store *store, const struct removal *removal, uint64_t first,
			uint64_t last)
{
	_cleanup_sql_ sqlite3_stmt *statement = NULL;
	char text[200];
	int err, removed;

	snprintf(text, sizeof(text),
		 "DELETE FROM %s WHERE %s IN"
		 " (SELECT %s FROM %s WHERE %s BETWEEN ?1 AND ?2 LIMIT %u)",
		 removal->table, removal->key, removal->key, removal->table, removal->key,
		 removal->at_once);
	err = sql_prepare(store->writer, text, &statement);
	if (err)
		return err;
	sql_bind(statement, "ii", first, last);
	do {
		err = sql_do(statement);
		removed = sqlite3_changes(store->writer); /* before pins come in between */
		if (!err)
			err = slice_pass(store, STORE_SLICE_BYTES / 4);
	} while (!err && removed);
	return err;
}

static int remove_all(struct store *store, const struct unfinished *unfinished)
{
	int err = 0;

	for (size_t i = 0; i < unfinished->count && !err; i++)
		err = remove_range(store, removals, unfinished->runs[i][0], unfinished->runs[i][1]);
	for (size_t i = 1; i < sizeof(removals) / sizeof(*removals) && !err; i++) {
		err = store_has_table(store->writer, removals[i].table);
		if (err > 0)
			err = remove_range(store, &removals[i],
					   (unfinished->sources + 1) << removals[i].shift,
					   INT64_MAX);
	}
	return err;
}

int store_undo(struct store *store, struct error *error)
{
	struct unfinished unfinished = {};
	int err;

	if (!store->slices.is_unfinished)
		return 0;
	store->slices.over = NULL;
	store->slices.err = 0;
	store_lock_after_pins(store);
	err = begin(store);
	if (!err)
		err = store_find_unfinished(store->writer, &unfinished);
	if (!err)
		err = remove_all(store, &unfinished);
	if (!err)
		err = finish(store);
	if (err) {
		sql_error_set(store->writer, "write to", error);
		store_rollback(store);
	}
	shrink_cache(store);
	pthread_mutex_unlock(&store->write_lock);
	free(unfinished.runs);
	return err;
}
