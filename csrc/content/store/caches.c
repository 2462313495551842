/* SPDX-License-Identifier: MIT */
/*
 * Caches in front of mirrors ("via"; docs/design/hosts.md). They are in a table of their own, which
 * older servers do not look at: to them, it is the same map.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/cleanup.h"
#include "base/json_text.h"
#include "content/store/internal.h"

static const char table[] = "CREATE TABLE IF NOT EXISTS caches("
			    " source INTEGER NOT NULL, mirror INTEGER NOT NULL, text TEXT NOT NULL,"
			    " PRIMARY KEY(source, mirror)) STRICT, WITHOUT ROWID";
static const char *const keys[] = { "via", "via_plain" };

static bool has_caches(const json_t *mirror)
{
	return json_object_get(mirror, keys[0]) || json_object_get(mirror, keys[1]);
}

json_t *store_text_without_caches(json_t *text)
{
	json_t *mirrors = json_object_get(text, "mirrors"), *plain, *copies;
	bool any = false;

	for (size_t i = 0; i < json_array_size(mirrors); i++)
		any |= has_caches(json_array_get(mirrors, i));
	if (!any)
		return json_incref(text);
	plain = json_copy(text);
	copies = json_array();
	for (size_t i = 0; i < json_array_size(mirrors); i++) {
		json_t *copy = json_copy(json_array_get(mirrors, i));

		json_object_del(copy, keys[0]);
		json_object_del(copy, keys[1]);
		json_array_append_new(copies, copy);
	}
	if (json_array_size(copies) == json_array_size(mirrors) &&
	    !json_object_set_new(plain, "mirrors", copies))
		return plain;
	json_decref(plain);
	return NULL;
}

static int store_of_mirror(struct store *store, uint64_t id, size_t number, const json_t *mirror)
{
	_cleanup_free_ char *words = NULL;
	json_t *text = json_object();

	for (size_t i = 0; i < sizeof(keys) / sizeof(*keys); i++) {
		json_t *value = json_object_get(mirror, keys[i]);

		if (value)
			json_object_set(text, keys[i], value);
	}
	words = json_text_dump(text, JSON_COMPACT | JSON_SORT_KEYS);
	json_decref(text);
	if (!words)
		return -ENOMEM;
	return sql_run_with(store->writer, "INSERT OR REPLACE INTO caches VALUES(?1, ?2, ?3)",
			    "iit", id, (uint64_t)number, words);
}

int new_source_store_caches(struct store *store, const struct new_source *made)
{
	const json_t *mirrors = json_object_get(made->text, "mirrors");
	int err = 0;

	for (size_t i = 0; !err && i < json_array_size(mirrors); i++) {
		const json_t *mirror = json_array_get(mirrors, i);

		if (!has_caches(mirror))
			continue;
		err = sql_run(store->writer, table);
		if (!err)
			err = store_of_mirror(store, made->id, i, mirror);
	}
	return err;
}

/* A lack of memory is an error, or counted (json_text_losses()). */
static int add(json_t *text, uint64_t number, const char *words)
{
	json_t *mirror = json_array_get(json_object_get(text, "mirrors"), number);
	json_t *given;

	if (!words)
		return -ENOMEM;
	given = json_text_parse(words, strlen(words), JSON_REJECT_DUPLICATES, NULL);
	for (size_t i = 0; i < sizeof(keys) / sizeof(*keys); i++) {
		json_t *value = json_object_get(given, keys[i]);

		if (value)
			json_object_set(mirror, keys[i], value);
	}
	json_decref(given);
	return 0;
}

int store_look_for_caches(struct store *store)
{
	int found = store_has_table(store->reader, "caches");

	store->has_caches = found == 1;
	return found < 0 ? found : 0;
}

int store_load_caches(struct store *store, uint64_t id, json_t *text)
{
	_cleanup_sql_ sqlite3_stmt *find = NULL;
	int err;

	if (!store->has_caches)
		return 0;
	err = sql_prepare(store->reader, "SELECT mirror, text FROM caches WHERE source = ?1",
			  &find);
	if (err)
		return err;
	sql_bind(find, "i", id);
	while ((err = sql_step(find)) == 1) {
		err = add(text, (uint64_t)sqlite3_column_int64(find, 0),
			  (const char *)sqlite3_column_text(find, 1));
		if (err)
			return err;
	}
	return err;
}
