/* SPDX-License-Identifier: MIT */
/* What the map says of a source: its text, and the identities that are pinned. */
#include <errno.h>
#include <string.h>

#include "base/cleanup.h"
#include "base/json_text.h"
#include "content/store/internal.h"

json_t *store_source_json(struct store *store, const struct source *source)
{
	_cleanup_sql_ sqlite3_stmt *find = NULL;
	json_t *found = NULL;
	const char *text;

	pthread_mutex_lock(&store->read_lock);
	if (!sql_prepare(store->reader, "SELECT text FROM sources WHERE id = ?1", &find)) {
		sqlite3_bind_int64(find, 1, (sqlite3_int64)source->id);
		text = sql_step(find) == 1 ? (const char *)sqlite3_column_text(find, 0) : NULL;
		if (text)
			found = json_text_parse(text, strlen(text), 0, NULL);
		sqlite3_finalize(find);
		find = NULL;
	}
	pthread_mutex_unlock(&store->read_lock);
	return found;
}

const char *store_identity_of(const char *text)
{
	const char *inode = strncmp(text, "device ", 7) ? NULL : strstr(text, " inode ");

	return inode ? inode + 1 : text;
}

int store_identity(struct store *store, const struct source *source, unsigned mirror,
		   char **identity)
{
	sqlite3_stmt *find = NULL;
	int found;

	pthread_mutex_lock(&store->read_lock);
	found = sql_prepare(store->reader,
			    "SELECT identity FROM identities WHERE source = ?1 AND mirror = ?2",
			    &find);
	if (!found) {
		sqlite3_bind_int64(find, 1, (sqlite3_int64)source->id);
		sqlite3_bind_int64(find, 2, mirror);
		found = sql_step(find);
	}
	if (found == 1) {
		const char *text = (const char *)sqlite3_column_text(find, 0);

		*identity = text ? strdup(store_identity_of(text)) : NULL;
		found = *identity ? 1 : -ENOMEM;
	}
	sqlite3_finalize(find);
	pthread_mutex_unlock(&store->read_lock);
	return found;
}
