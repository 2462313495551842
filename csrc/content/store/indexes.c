/* SPDX-License-Identifier: MIT */
/*
 * Codecs and indexes of sources: taken from files when sources are added, kept in the map in
 * pages, as digests are, and checked again whenever they are loaded.
 */
#include <endian.h>
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/cleanup.h"
#include "base/keys.h"
#include "content/codec.h"
#include "content/selection.h"
#include "content/store/internal.h"

static const char tables[] = "CREATE TABLE IF NOT EXISTS layouts("
			     " page INTEGER PRIMARY KEY, part BLOB NOT NULL) STRICT;"
			     "CREATE TABLE IF NOT EXISTS windows("
			     " point INTEGER PRIMARY KEY, window BLOB NOT NULL) STRICT;";

static const struct store_file_kind index_file = {
	.key = "index",
	.least = sizeof(struct codec_index_header),
	.most = CODEC_INDEX_BYTES_MAX,
	.insert_page = "INSERT INTO layouts VALUES(?1, ?2)",
	.find_pages = "SELECT part FROM layouts WHERE page BETWEEN ?1 AND ?1 + 4294967295"
		      " ORDER BY page",
	.insert_part = "INSERT INTO windows VALUES(?1, ?2)",
	.find_parts = "SELECT window FROM windows WHERE point BETWEEN ?1 AND ?1 + 4294967295"
		      " ORDER BY point",
};

static int take_codec(json_t *text, const struct codec_ops **codec, struct error *error)
{
	const json_t *given = json_object_get(text, "codec");
	const char *name = json_string_value(given);
	char known[100];

	*codec = NULL;
	if (!given)
		return 0;
	*codec = name ? codec_find(name) : NULL;
	if (*codec)
		return 0;
	error_set_hint(error, "known codecs: %s", codec_names(known, sizeof(known)));
	return error_set(error, -EINVAL, "\"codec\" is %s%.100s%s, which is unknown",
			 name ? "\"" : "", name ?: "no string", name ? "\"" : "");
}

int store_parse_source(const json_t *text, struct source **source, struct error *error)
{
	static const char *const of_the_map[] = { "root",  "digests",	 "codec",
						  "index", "coded_size", "selection" };
	json_t *keys = json_copy((json_t *)text);
	const struct codec_ops *codec;
	int err;

	if (!keys)
		return error_set(error, -ENOMEM, "no memory for a source");
	err = take_codec(keys, &codec, error);
	for (size_t i = 0; i < sizeof(of_the_map) / sizeof(*of_the_map); i++)
		json_object_del(keys, of_the_map[i]);
	if (!err)
		err = source_parse(keys, source, error);
	json_decref(keys);
	if (err || !codec)
		return err;
	(*source)->codec = codec;
	(*source)->object_bytes = (uint64_t)json_integer_value(json_object_get(text, "coded_size"));
	return 0;
}

static int parse_file(struct new_source *made, const struct codec_ops *codec, const char *path,
		      struct error *error)
{
	const struct codec_index_header *header;
	uint64_t head, windows;
	int err;

	err = store_file_take(&index_file, path, made->text, &made->index_file, &made->index_bytes,
			      error);
	if (err)
		return err;
	header = (const struct codec_index_header *)made->index_file;
	windows = le64toh(header->windows_bytes);
	head = windows < made->index_bytes ? made->index_bytes - windows : made->index_bytes;
	err = codec_index_parse(made->index_file, head, &made->index, error);
	if (!err && strcmp(made->index->codec, codec->name) != 0)
		err = error_set(error, -EINVAL, "'%s' is an index for the codec %s, not for %s",
				path, made->index->codec, codec->name);
	if (!err && made->index->windows_bytes && !codec->has_windows)
		err = error_set(error, -EINVAL, "'%s' has windows, and %s needs none", path,
				codec->name);
	if (err)
		error_set_hint(error, "make it anew: btrfs-ublk map index");
	return err;
}

static int set_texts(struct new_source *made, struct error *error)
{
	const json_t *size = json_object_get(made->text, "size");
	const struct selection *selection = made->selection;
	uint64_t bytes = selection ? selection->count * selection->unit_bytes : made->index->size;

	if (size && (!json_is_integer(size) || (uint64_t)json_integer_value(size) != bytes))
		return error_set(error, -EINVAL,
				 "\"size\" is %lld, and the %s says %" PRIu64
				 ": it is that of what is read",
				 (long long)json_integer_value(size),
				 selection ? "selection" : "index", bytes);
	if (json_object_set_new(made->text, "size", json_integer((json_int_t)bytes)) ||
	    json_object_set_new(made->text, "coded_size",
				json_integer((json_int_t)made->index->coded_bytes)))
		return error_set(error, -ENOMEM, "no memory for a source");
	return 0;
}

int new_source_take_index(struct new_source *made, struct error *error)
{
	const json_t *given = json_object_get(made->text, "index");
	const char *path = json_string_value(json_object_get(given, "path"));
	const struct codec_ops *codec;
	int err = take_codec(made->text, &codec, error);

	if (err)
		return err;
	if (!codec && json_object_get(made->text, "selection"))
		return error_set(error, -EINVAL, "a \"selection\" without a \"codec\"");
	if (!codec)
		return given ? error_set(error, -EINVAL, "an \"index\" without a \"codec\"") : 0;
	/* As the map describes it: the source must be there already, see new_source_check_index(). */
	if (json_is_string(given) && json_is_integer(json_object_get(made->text, "coded_size")) &&
	    json_object_get(made->text, "size"))
		return 0;
	if (json_object_get(made->text, "coded_size"))
		return error_set(error, -EINVAL, "unknown key \"coded_size\": the index says it");
	if (!path || json_object_size(given) != 1) {
		error_set_hint(error, "make one: btrfs-ublk map index");
		return error_set(error, -EINVAL, "the codec %s needs \"index\": {\"path\": FILE}",
				 codec->name);
	}
	err = parse_file(made, codec, path, error);
	if (!err)
		err = new_source_take_selection(made, error);
	return err ?: set_texts(made, error);
}

int source_set_index(struct store *store, struct source *source, struct codec_index **index,
		     struct error *error)
{
	int err = 0;

	if (source->computed)
		return error_set(error, -EINVAL, "a computed source has no codec");
	if (strcmp((*index)->codec, source->codec->name) != 0 ||
	    (!source->selection && (*index)->size != source->size) ||
	    (*index)->coded_bytes != source->object_bytes)
		return error_set(error, -EUCLEAN, "the index is that of another source");
	if (!source->selection)
		err = codec_index_check_units(*index, source->unit_bytes, error);
	if (err)
		return err;
	if (store->ops->decode(source, store))
		return error_set(error, -ENOMEM, "no memory for a source");
	source->index = *index;
	*index = NULL;
	return 0;
}

static int insert_parts(struct store *store, const struct new_source *made, uint64_t id)
{
	_cleanup_sql_ sqlite3_stmt *window = NULL;
	const struct codec_index *index = made->source->index;
	uint64_t at = made->index_bytes - index->windows_bytes;
	int err = store_file_insert_pages(&index_file, store, id, made->index_file, at);

	if (!err)
		err = sql_prepare(store->writer, index_file.insert_part, &window);
	for (uint64_t i = 0; !err && i < index->count; i++) {
		uint32_t bytes = index->points[i].window_bytes;

		if (bytes)
			err = store_file_insert(store, window, id, i, made->index_file + at, bytes);
		at += bytes;
	}
	return err;
}

int new_source_check_index(const struct new_source *made, struct error *error)
{
	if (!made->source->codec || made->source->index)
		return 0;
	error_set_hint(error, "add \"index\": {\"path\": FILE}");
	return error_set(error, -EINVAL,
			 "the map has no such source, so the digest of an index is not enough");
}

int new_source_store_index(struct store *store, const struct new_source *made, uint64_t id,
			   struct error *error)
{
	int err;

	if (!made->source->codec)
		return 0;
	err = sql_run(store->writer, tables);
	if (!err)
		err = insert_parts(store, made, id);
	if (err)
		return sql_error_set(store->writer, "write an index to", error) ?: err;
	return new_source_store_selection(store, made, id, error);
}

int store_load_index(struct store *store, struct source *source, struct error *error)
{
	_cleanup_free_ uint8_t *head = NULL;
	struct codec_index *index = NULL;
	uint64_t bytes;
	int err;

	if (!source->codec)
		return 0;
	err = store_file_load_head(&index_file, store, source->id,
				   codec_index_head_bytes(CODEC_POINTS_MAX), &head, &bytes);
	if (err)
		error_set_text(error, "cannot load the index of source %" PRIu64 ": %s", source->id,
			       strerror(-err));
	else
		err = codec_index_parse(head, bytes, &index, error);
	if (!err)
		err = store_load_selection(store, source, index, error);
	if (!err)
		err = source_set_index(store, source, &index, error);
	free(index);
	return err;
}

int store_window(struct store *store, const struct source *source, uint64_t point, uint8_t *window,
		 uint32_t *bytes)
{
	_cleanup_sql_ sqlite3_stmt *find = NULL;
	int err;

	*bytes = 0;
	if (!source->index->points[point].window_bytes)
		return 0;
	pthread_mutex_lock(&store->read_lock);
	err = sql_prepare(store->reader, "SELECT window FROM windows WHERE point = ?1", &find);
	if (!err) {
		sqlite3_bind_int64(find, 1,
				   (sqlite3_int64)(source->id << DIGEST_PAGE_BITS | point));
		err = sql_step(find);
	}
	if (err == 1)
		err = codec_window_unpack(sqlite3_column_blob(find, 0),
					  (uint32_t)sqlite3_column_bytes(find, 0), window, bytes) ?
			      -EUCLEAN :
			      0;
	else if (!err)
		err = -EUCLEAN;
	sqlite3_finalize(find);
	find = NULL;
	pthread_mutex_unlock(&store->read_lock);
	return err;
}

int store_check_index(struct store *store, const struct source *source)
{
	int err = source->codec ? store_file_check(&index_file, store, source) : 0;

	return err ?: store_check_selection(store, source);
}
