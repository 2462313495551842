/* SPDX-License-Identifier: MIT */
#include "content/store.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "content/store/internal.h"

static int init_locks(struct store *store)
{
	int err = pin_queue_init(&store->pins);

	if (err)
		return err;
	pthread_mutex_init(&store->add_lock, NULL);
	pthread_mutex_init(&store->write_lock, NULL);
	pthread_mutex_init(&store->read_lock, NULL);
	pthread_mutex_init(&store->pages_lock, NULL);
	return 0;
}

int store_open(const char *path, struct map *map, const struct store_fetch_ops *ops,
	       struct store **store, struct error *error)
{
	struct store *made = calloc(1, sizeof(*made));
	int err;

	if (!made || init_locks(made)) {
		free(made);
		return error_set(error, -ENOMEM, "no memory for a map");
	}
	made->map = map;
	made->ops = ops;
	made->slices.most_bytes = STORE_SLICE_BYTES;
	err = store_file_open(made, path, error);
	if (!err)
		err = store_load(made, error);
	if (err)
		store_close(made);
	else
		*store = made;
	return err;
}

void store_use_fetcher(struct store *store, struct fetcher *fetcher)
{
	store->fetcher = fetcher;
}

void store_close(struct store *store)
{
	if (!store)
		return;
	store_file_close(store);
	for (uint64_t i = 0; i < store->source_count; i++)
		source_free(store->sources[i]);
	free(store->sources);
	pin_queue_deinit(&store->pins);
	pthread_mutex_destroy(&store->add_lock);
	pthread_mutex_destroy(&store->write_lock);
	pthread_mutex_destroy(&store->read_lock);
	pthread_mutex_destroy(&store->pages_lock);
	digest_pages_free(store);
	free(store);
}

const char *store_path(const struct store *store)
{
	return store->path;
}

uint64_t store_source_count(struct store *store)
{
	uint64_t count;

	pthread_mutex_lock(&store->write_lock);
	count = store->source_count;
	pthread_mutex_unlock(&store->write_lock);
	return count;
}

struct source *store_source(struct store *store, uint64_t id)
{
	struct source *source = NULL;

	pthread_mutex_lock(&store->write_lock);
	if (id && id <= store->source_count)
		source = store->sources[id - 1];
	pthread_mutex_unlock(&store->write_lock);
	return source;
}

static bool has_moved(struct store *store)
{
	int moved = 0;

	pthread_mutex_lock(&store->read_lock);
	sqlite3_file_control(store->reader, NULL, SQLITE_FCNTL_HAS_MOVED, &moved);
	pthread_mutex_unlock(&store->read_lock);
	return moved;
}

/* Returns how many units are pinned, or a negative errno. */
static int64_t count_pins(sqlite3 *db, const struct source *source)
{
	_cleanup_sql_ sqlite3_stmt *count = NULL;
	int found = sql_find(db, &count, "SELECT count(*) FROM pins WHERE source = ?1", "i",
			     source->id);

	return found == 1 ? sqlite3_column_int64(count, 0) : found;
}

/* Use a connection of its own: counting millions takes a while, and reads need the others. */
int64_t store_pin_count(struct store *store, const struct source *source)
{
	struct error error = {};
	sqlite3 *db = NULL;
	int64_t found;

	if (has_moved(store)) {
		pthread_mutex_lock(&store->read_lock);
		found = count_pins(store->reader, source);
		pthread_mutex_unlock(&store->read_lock);
		return found;
	}
	found = store_file_connect(store, &db, &error);
	if (!found)
		found = count_pins(db, source);
	sqlite3_close(db);
	return found;
}

static int check_with(sqlite3 *db, const char *path, struct error *error)
{
	_cleanup_sql_ sqlite3_stmt *check = NULL;
	int found = sql_find(db, &check, "PRAGMA integrity_check(1)", "");
	const char *text;

	if (found < 1)
		return sql_error_set(db, "check", error) ?: -EUCLEAN;
	text = (const char *)sqlite3_column_text(check, 0);
	if (!text || strcmp(text, "ok") != 0)
		return error_set(error, -EUCLEAN, "map '%s' is damaged: %s", path,
				 text ?: "no memory");
	return 0;
}

/* Use a connection of its own: it may take minutes, and reads need the others. */
int store_check(struct store *store, struct error *error)
{
	sqlite3 *db = NULL;
	int err;

	if (has_moved(store))
		return error_set(error, -ESTALE,
				 "map '%s' was moved or removed while the server has it",
				 store->path);
	err = store_file_connect(store, &db, error);
	err = err ? sql_error_set(db, "check", error) ?: err : check_with(db, store->path, error);
	sqlite3_close(db);
	return err;
}
