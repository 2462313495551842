/* SPDX-License-Identifier: MIT */
/*
 * Selections of sources: taken from files when sources are added, kept in the map, and checked
 * again whenever they are loaded, as indexes are.
 */
#include <endian.h>
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/cleanup.h"
#include "content/selection.h"
#include "content/store/internal.h"

static const char tables[] = "CREATE TABLE IF NOT EXISTS selections("
			     " page INTEGER PRIMARY KEY, part BLOB NOT NULL) STRICT;"
			     "CREATE TABLE IF NOT EXISTS pieces("
			     " unit INTEGER PRIMARY KEY, list BLOB NOT NULL) STRICT;";

static const struct store_file_kind selection_file = {
	.key = "selection",
	.least = sizeof(struct selection_header),
	.most = SELECTION_BYTES_MAX,
	.insert_page = "INSERT INTO selections VALUES(?1, ?2)",
	.find_pages = "SELECT part FROM selections WHERE page BETWEEN ?1 AND ?1 + 4294967295"
		      " ORDER BY page",
	.insert_part = "INSERT INTO pieces VALUES(?1, ?2)",
	.find_parts = "SELECT list FROM pieces WHERE unit BETWEEN ?1 AND ?1 + 4294967295"
		      " ORDER BY unit",
};

/* Where the pieces begin in a file, of which nothing has been checked but that it has a header. */
static uint64_t head_bytes(const struct new_source *made)
{
	const struct selection_header *header =
		(const struct selection_header *)made->selection_file;
	uint64_t units = le64toh(header->units);
	uint64_t bytes = units <= SELECTION_UNITS_MAX ? selection_head_bytes(units) : UINT64_MAX;

	return bytes < made->selection_bytes ? bytes : made->selection_bytes;
}

/* Checks all pieces, so that reads cannot be the first to find that they are wrong. */
static int check_pieces(const struct new_source *made, uint64_t head, struct error *error)
{
	const struct selection *selection = made->selection;
	_cleanup_free_ struct codec_part *parts =
		calloc(SELECTION_PIECES_MAX, sizeof(struct codec_part));
	_cleanup_free_ uint8_t *unit = malloc(selection->unit_bytes);
	const uint8_t *at = made->selection_file + head;

	if (!parts || !unit)
		return error_set(error, -ENOMEM, "no memory for a selection");
	if (made->selection_bytes - head != selection->pieces * sizeof(struct selection_piece))
		return error_set(error, -EINVAL,
				 "the selection is damaged: its pieces have %" PRIu64 " bytes",
				 made->selection_bytes - head);
	for (uint64_t i = 0; i < selection->count; i++) {
		size_t bytes = selection->units[i].pieces * sizeof(struct selection_piece);

		if (selection_parts(selection, i, at, bytes, 0, unit, parts))
			return error_set(
				error, -EINVAL,
				"the pieces of unit %" PRIu64 " of the selection are wrong", i);
		at += bytes;
	}
	return 0;
}

int new_source_take_selection(struct new_source *made, struct error *error)
{
	const json_t *given = json_object_get(made->text, selection_file.key);
	const char *path = json_string_value(json_object_get(given, "path"));
	uint64_t head;
	int err;

	if (!given)
		return 0;
	if (!path || json_object_size(given) != 1)
		return error_set(error, -EINVAL, "\"selection\" is not {\"path\": FILE}");
	err = store_file_take(&selection_file, path, made->text, &made->selection_file,
			      &made->selection_bytes, error);
	if (err)
		return err;
	head = head_bytes(made);
	err = selection_parse(made->selection_file, head, &made->selection, error);
	return err ?: check_pieces(made, head, error);
}

int source_set_selection(struct source *source, struct selection **selection,
			 const struct codec_index *index, struct error *error)
{
	if ((*selection)->unit_bytes != source->unit_bytes)
		return error_set(error, -EINVAL,
				 "\"unit\" is %u, and the selection is for units of %u",
				 source->unit_bytes, (*selection)->unit_bytes);
	if ((*selection)->count * (*selection)->unit_bytes != source->size)
		return error_set(error, -EUCLEAN, "the selection is that of another source");
	source->selection = *selection;
	*selection = NULL;
	return selection_check(source->selection, index, error);
}

static int insert_parts(struct store *store, const struct new_source *made, uint64_t id)
{
	const struct selection *selection = made->source->selection;
	_cleanup_sql_ sqlite3_stmt *list = NULL;
	uint64_t at = selection_head_bytes(selection->count);
	int err = store_file_insert_pages(&selection_file, store, id, made->selection_file, at);

	if (!err)
		err = sql_prepare(store->writer, selection_file.insert_part, &list);
	for (uint64_t i = 0; !err && i < selection->count; i++) {
		uint64_t bytes = selection->units[i].pieces * sizeof(struct selection_piece);

		err = store_file_insert(store, list, id, i, made->selection_file + at, bytes);
		at += bytes;
	}
	return err;
}

int new_source_store_selection(struct store *store, const struct new_source *made, uint64_t id,
			       struct error *error)
{
	int err;

	if (!made->source->selection)
		return 0;
	err = sql_run(store->writer, tables);
	if (!err)
		err = insert_parts(store, made, id);
	return err ? sql_error_set(store->writer, "write a selection to", error) ?: err : 0;
}

int store_load_selection(struct store *store, struct source *source,
			 const struct codec_index *index, struct error *error)
{
	_cleanup_free_ uint8_t *head = NULL;
	struct selection *selection = NULL;
	json_t *text = store_source_json(store, source);
	bool expected = json_object_get(text, selection_file.key);
	uint64_t bytes;
	int err;

	json_decref(text);
	if (!expected)
		return 0;
	err = store_file_load_head(&selection_file, store, source->id,
				   selection_head_bytes(SELECTION_UNITS_MAX), &head, &bytes);
	if (err)
		error_set_text(error, "cannot load the selection of source %" PRIu64 ": %s",
			       source->id, strerror(-err));
	else
		err = selection_parse(head, bytes, &selection, error);
	if (!err)
		err = source_set_selection(source, &selection, index, error);
	free(selection);
	return err;
}

int store_selected(struct store *store, const struct source *source, uint64_t unit, uint32_t gap,
		   uint8_t *data, struct codec_part *parts)
{
	_cleanup_sql_ sqlite3_stmt *find = NULL;
	int err;

	pthread_mutex_lock(&store->read_lock);
	err = sql_prepare(store->reader, "SELECT list FROM pieces WHERE unit = ?1", &find);
	if (!err) {
		sqlite3_bind_int64(find, 1, (sqlite3_int64)(source->id << DIGEST_PAGE_BITS | unit));
		err = sql_step(find);
	}
	if (err == 1)
		err = selection_parts(source->selection, unit, sqlite3_column_blob(find, 0),
				      (size_t)sqlite3_column_bytes(find, 0), gap, data, parts);
	else if (!err)
		err = -EUCLEAN;
	sqlite3_finalize(find);
	find = NULL;
	pthread_mutex_unlock(&store->read_lock);
	return err;
}

int store_check_selection(struct store *store, const struct source *source)
{
	return source->selection ? store_file_check(&selection_file, store, source) : 0;
}
