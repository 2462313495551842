/* SPDX-License-Identifier: MIT */
/*
 * Codecs of sources, their indexes and selections: taken from files when sources are added, kept in
 * the map in pages, as digests are, and checked again whenever they are loaded.
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

static const struct store_file_kind index_file = {
	"index", sizeof(struct codec_index_header), CODEC_INDEX_BYTES_MAX,
	STORE_FILE_TABLES("layouts", "windows", "point", "window")
};
static const struct store_file_kind selection_file = {
	"selection", sizeof(struct selection_header), SELECTION_BYTES_MAX,
	STORE_FILE_TABLES("selections", "pieces", "unit", "list")
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

/* Where the pieces begin in a file, whose header may say anything. */
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

static int take_selection(struct new_source *made, struct error *error)
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
		err = take_selection(made, error);
	return err ?: set_texts(made, error);
}

static int set_selection(struct source *source, struct selection **selection,
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

int source_set_index(struct store *store, struct source *source, struct codec_index **index,
		     struct selection **selection, struct error *error)
{
	int err = *selection ? set_selection(source, selection, *index, error) : 0;

	if (err)
		return err;
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

static uint32_t window_bytes(const void *index, uint64_t point)
{
	return ((const struct codec_index *)index)->points[point].window_bytes;
}

static uint32_t pieces_bytes(const void *selection, uint64_t unit)
{
	return ((const struct selection *)selection)->units[unit].pieces *
	       (uint32_t)sizeof(struct selection_piece);
}

int new_source_check_index(const struct new_source *made, struct error *error)
{
	if (!made->source->codec || made->source->index)
		return 0;
	error_set_hint(error, "add \"index\": {\"path\": FILE}");
	return error_set(error, -EINVAL,
			 "the map has no such source, so the digest of an index is not enough");
}

int new_source_store_index(struct store *store, const struct new_source *made, uint64_t id)
{
	const struct codec_index *index = made->source->index;
	const struct selection *selection = made->source->selection;
	int err = 0;

	if (made->source->codec)
		err = store_file_write(&index_file, store, id, made->index_file,
				       made->index_bytes - index->windows_bytes, index->count,
				       window_bytes, index);
	if (!err && selection)
		err = store_file_write(&selection_file, store, id, made->selection_file,
				       selection_head_bytes(selection->count), selection->count,
				       pieces_bytes, selection);
	return err;
}

static int load_selection(struct store *store, const struct source *source,
			  struct selection **selection, struct error *error)
{
	_cleanup_free_ uint8_t *head = NULL;
	json_t *text = store_source_json(store, source);
	bool expected = json_object_get(text, selection_file.key);
	uint64_t bytes;
	int err;

	json_decref(text);
	if (!expected)
		return 0;
	err = store_file_load_head(&selection_file, store, source->id,
				   selection_head_bytes(SELECTION_UNITS_MAX), &head, &bytes, error);
	return err ?: selection_parse(head, bytes, selection, error);
}

int store_load_index(struct store *store, struct source *source, struct error *error)
{
	_cleanup_free_ uint8_t *head = NULL;
	struct codec_index *index = NULL;
	struct selection *selection = NULL;
	uint64_t bytes;
	int err;

	if (!source->codec)
		return 0;
	err = store_file_load_head(&index_file, store, source->id,
				   codec_index_head_bytes(CODEC_POINTS_MAX), &head, &bytes, error);
	if (!err)
		err = codec_index_parse(head, bytes, &index, error);
	if (!err)
		err = load_selection(store, source, &selection, error);
	if (!err)
		err = source_set_index(store, source, &index, &selection, error);
	free(index);
	free(selection);
	return err;
}

static int load_window(struct store *store, const struct source *source, uint64_t point,
		       uint8_t *window, uint32_t *bytes)
{
	_cleanup_unlock_ pthread_mutex_t *locked = store_lock(&store->read_lock);
	_cleanup_sql_ sqlite3_stmt *find = NULL;
	int err = store_file_find_part(&index_file, store, source->id, point, &find);

	if (!err && codec_window_unpack(sqlite3_column_blob(find, 0),
					(uint32_t)sqlite3_column_bytes(find, 0), window, bytes))
		err = -EUCLEAN;
	return err;
}

int store_window(struct store *store, const struct source *source, uint64_t point, uint8_t *window,
		 uint32_t *bytes)
{
	*bytes = 0;
	if (!source->index->points[point].window_bytes)
		return 0;
	return load_window(store, source, point, window, bytes);
}

int store_selected(struct store *store, const struct source *source, uint64_t unit, uint32_t gap,
		   uint8_t *data, struct codec_part *parts)
{
	_cleanup_unlock_ pthread_mutex_t *locked = store_lock(&store->read_lock);
	_cleanup_sql_ sqlite3_stmt *find = NULL;
	int err = store_file_find_part(&selection_file, store, source->id, unit, &find);

	return err   ?:
		       selection_parts(source->selection, unit, sqlite3_column_blob(find, 0),
				       (size_t)sqlite3_column_bytes(find, 0), gap, data, parts);
}

int store_check_index(struct store *store, const struct source *source)
{
	int err = source->codec ? store_file_check(&index_file, store, source) : 0;

	if (!err && source->selection)
		err = store_file_check(&selection_file, store, source);
	return err;
}
