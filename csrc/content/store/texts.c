/* SPDX-License-Identifier: MIT */
/* What the map says of a source: its text, and the identities that are pinned. */
#include <errno.h>
#include <string.h>

#include "base/cleanup.h"
#include "base/json_text.h"
#include "content/store/internal.h"

json_t *store_source_json(struct store *store, const struct source *source)
{
	_cleanup_unlock_ pthread_mutex_t *locked = store_lock(&store->read_lock);
	_cleanup_sql_ sqlite3_stmt *find = NULL;
	int found = sql_find(store->reader, &find, "SELECT text FROM sources WHERE id = ?1", "i",
			     source->id);
	const char *text = found == 1 ? (const char *)sqlite3_column_text(find, 0) : NULL;

	return text ? json_text_parse(text, strlen(text), 0, NULL) : NULL;
}

const char *store_identity_of(const char *text)
{
	const char *inode = strncmp(text, "device ", 7) ? NULL : strstr(text, " inode ");

	return inode ? inode + 1 : text;
}

int store_identity(struct store *store, const struct source *source, unsigned mirror,
		   char **identity)
{
	_cleanup_unlock_ pthread_mutex_t *locked = store_lock(&store->read_lock);
	_cleanup_sql_ sqlite3_stmt *find = NULL;
	int found = sql_find(store->reader, &find,
			     "SELECT identity FROM identities WHERE source = ?1 AND mirror = ?2",
			     "ii", source->id, (uint64_t)mirror);

	if (found == 1) {
		const char *text = (const char *)sqlite3_column_text(find, 0);

		*identity = text ? strdup(store_identity_of(text)) : NULL;
		found = *identity ? 1 : -ENOMEM;
	}
	return found;
}
