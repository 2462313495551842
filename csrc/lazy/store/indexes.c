/* SPDX-License-Identifier: MIT */
/*
 * Codecs and indexes of sources: taken from files when sources are added, kept in the map in
 * pages, as digests are, and checked again whenever they are loaded.
 */
#include <endian.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <openssl/evp.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/cleanup.h"
#include "base/fileio.h"
#include "lazy/codec.h"
#include "lazy/coded.h"
#include "lazy/keys.h"
#include "lazy/store/internal.h"

enum { INDEX_PAGE_BYTES = 4032 };

static const char tables[] = "PRAGMA user_version=2;"
			     "CREATE TABLE IF NOT EXISTS layouts("
			     " page INTEGER PRIMARY KEY, part BLOB NOT NULL) STRICT;"
			     "CREATE TABLE IF NOT EXISTS windows("
			     " point INTEGER PRIMARY KEY, window BLOB NOT NULL) STRICT;";

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
	static const char *const of_the_map[] = { "root", "digests", "codec", "index",
						  "coded_size" };
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

static int read_file(const char *path, uint8_t **data, uint64_t *bytes, struct error *error)
{
	/* Do not wait for a writer if this is a FIFO. */
	_cleanup_close_ int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOCTTY | O_NONBLOCK);
	struct stat status;
	int err;

	if (*path != '/')
		return error_set(error, -EINVAL, "the path of an index '%s' is not absolute", path);
	if (fd < 0 || fstat(fd, &status))
		return error_set(error, -errno, "cannot open index '%s': %s", path,
				 strerror(errno));
	if (!S_ISREG(status.st_mode))
		return error_set(error, -EINVAL, "'%s' is no regular file", path);
	if (status.st_size < (off_t)sizeof(struct codec_index_header) ||
	    status.st_size > CODEC_INDEX_BYTES_MAX)
		return error_set(error, -EINVAL, "'%s' has %lld bytes: it is no index", path,
				 (long long)status.st_size);
	*bytes = (uint64_t)status.st_size;
	*data = malloc(*bytes);
	err = *data ? pread_full(fd, *data, *bytes, 0) : -ENOMEM;
	return err ? error_set(error, err, "cannot read index '%s': %s", path, strerror(-err)) : 0;
}

static int parse_file(struct new_source *made, const struct codec_ops *codec, const char *path,
		      struct error *error)
{
	const struct codec_index_header *header;
	uint64_t head, windows;
	int err;

	err = read_file(path, &made->index_file, &made->index_bytes, error);
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
	uint8_t digest[SOURCE_DIGEST_BYTES];
	char hex[2 * SOURCE_DIGEST_BYTES + 1];
	const json_t *size = json_object_get(made->text, "size");

	if (size &&
	    (!json_is_integer(size) || (uint64_t)json_integer_value(size) != made->index->size))
		return error_set(error, -EINVAL,
				 "\"size\" is %lld, and the index says %" PRIu64
				 ": it is that of what is read",
				 (long long)json_integer_value(size), made->index->size);
	if (!EVP_Digest(made->index_file, made->index_bytes, digest, NULL, EVP_sha256(), NULL))
		return error_set(error, -ENOMEM, "no memory for an index");
	digest_to_hex(digest, hex);
	if (json_object_set_new(made->text, "size", json_integer((json_int_t)made->index->size)) ||
	    json_object_set_new(made->text, "coded_size",
				json_integer((json_int_t)made->index->coded_bytes)) ||
	    json_object_set_new(made->text, "index", json_string(hex)))
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
	if (!codec)
		return given ? error_set(error, -EINVAL, "an \"index\" without a \"codec\"") : 0;
	/* As the map describes it: the source must be there already, see new_source_store_index(). */
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
	return err ? err : set_texts(made, error);
}

int source_set_index(struct store *store, struct source *source, struct codec_index **index,
		     struct error *error)
{
	int err;

	if (source->computed)
		return error_set(error, -EINVAL, "a computed source has no codec");
	if (strcmp((*index)->codec, source->codec->name) != 0 || (*index)->size != source->size ||
	    (*index)->coded_bytes != source->object_bytes)
		return error_set(error, -EUCLEAN, "the index is that of another source");
	err = codec_index_check_units(*index, source->unit_bytes, error);
	if (err)
		return err;
	if (coded_wrap(source, store))
		return error_set(error, -ENOMEM, "no memory for a source");
	source->index = *index;
	*index = NULL;
	return 0;
}

static int insert(sqlite3_stmt *statement, uint64_t id, uint64_t number, const uint8_t *data,
		  uint64_t bytes)
{
	sqlite3_bind_int64(statement, 1, (sqlite3_int64)(id << DIGEST_PAGE_BITS | number));
	sqlite3_bind_blob(statement, 2, data, (int)bytes, SQLITE_STATIC);
	return sql_do(statement);
}

static int insert_parts(struct store *store, const struct new_source *made, uint64_t id)
{
	_cleanup_sql_ sqlite3_stmt *page = NULL, *window = NULL;
	const struct codec_index *index = made->source->index;
	uint64_t head = made->index_bytes - index->windows_bytes, at = head;
	int err = sql_prepare(store->writer, "INSERT INTO layouts VALUES(?1, ?2)", &page);

	if (!err)
		err = sql_prepare(store->writer, "INSERT INTO windows VALUES(?1, ?2)", &window);
	for (uint64_t done = 0; !err && done < head; done += INDEX_PAGE_BYTES)
		err = insert(page, id, done / INDEX_PAGE_BYTES, made->index_file + done,
			     head - done < INDEX_PAGE_BYTES ? head - done : INDEX_PAGE_BYTES);
	for (uint64_t i = 0; !err && i < index->count; i++) {
		uint32_t bytes = index->points[i].window_bytes;

		if (bytes)
			err = insert(window, id, i, made->index_file + at, bytes);
		at += bytes;
	}
	return err;
}

int new_source_store_index(struct store *store, const struct new_source *made, uint64_t id,
			   struct error *error)
{
	int err;

	if (!made->source->codec)
		return 0;
	if (!made->source->index) {
		error_set_hint(error, "add \"index\": {\"path\": FILE}");
		return error_set(
			error, -EINVAL,
			"the map has no such source, so the digest of an index is not enough");
	}
	err = sql_run(store->writer, tables);
	if (!err)
		err = insert_parts(store, made, id);
	return err ? sql_error_set(store->writer, "write an index to", error) : 0;
}

typedef int (*part_fn)(const void *data, size_t bytes, void *argument);

/* Goes through the parts of an index, in the order of its file. */
static int for_parts(sqlite3 *db, const char *query, uint64_t id, part_fn each, void *argument)
{
	_cleanup_sql_ sqlite3_stmt *find = NULL;
	int err = sql_prepare(db, query, &find);

	if (err)
		return err;
	sqlite3_bind_int64(find, 1, (sqlite3_int64)(id << DIGEST_PAGE_BITS));
	while ((err = sql_step(find)) == 1) {
		err = each(sqlite3_column_blob(find, 0), (size_t)sqlite3_column_bytes(find, 0),
			   argument);
		if (err)
			return err;
	}
	return err;
}

static const char find_pages[] =
	"SELECT part FROM layouts WHERE page BETWEEN ?1 AND ?1 + 4294967295"
	" ORDER BY page";
static const char find_windows[] =
	"SELECT window FROM windows WHERE point BETWEEN ?1 AND ?1 + 4294967295 ORDER BY point";

struct head {
	uint8_t *data;
	size_t bytes;
};

static int append(const void *data, size_t bytes, void *argument)
{
	struct head *head = argument;
	uint8_t *grown = realloc(head->data, head->bytes + bytes + 1);

	if (!grown)
		return -ENOMEM;
	head->data = grown;
	if (bytes)
		memcpy(head->data + head->bytes, data, bytes);
	head->bytes += bytes;
	return head->bytes > codec_index_head_bytes(CODEC_POINTS_MAX) ? -EUCLEAN : 0;
}

int store_load_index(struct store *store, struct source *source, struct error *error)
{
	struct codec_index *index = NULL;
	struct head head = {};
	int err;

	if (!source->codec)
		return 0;
	err = for_parts(store->reader, find_pages, source->id, append, &head);
	if (err)
		error_set_text(error, "cannot load the index of source %" PRIu64 ": %s", source->id,
			       strerror(-err));
	else
		err = codec_index_parse(head.data ?: (const uint8_t *)"", head.bytes, &index,
					error);
	if (!err)
		err = source_set_index(store, source, &index, error);
	free(head.data);
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

static int add_to_digest(const void *data, size_t bytes, void *argument)
{
	return EVP_DigestUpdate(argument, data, bytes) ? 0 : -ENOMEM;
}

static int digest_of(sqlite3 *db, uint64_t id, uint8_t digest[static SOURCE_DIGEST_BYTES])
{
	EVP_MD_CTX *context = EVP_MD_CTX_new();
	int err = context && EVP_DigestInit_ex(context, EVP_sha256(), NULL) ? 0 : -ENOMEM;

	if (!err)
		err = for_parts(db, find_pages, id, add_to_digest, context);
	if (!err)
		err = for_parts(db, find_windows, id, add_to_digest, context);
	if (!err && !EVP_DigestFinal_ex(context, digest, NULL))
		err = -ENOMEM;
	EVP_MD_CTX_free(context);
	return err;
}

int store_check_index(struct store *store, const struct source *source)
{
	uint8_t expected[SOURCE_DIGEST_BYTES], found[SOURCE_DIGEST_BYTES];
	struct error error = {};
	sqlite3 *db = NULL;
	const char *hex;
	json_t *text;
	int err;

	if (!source->codec)
		return 0;
	text = store_source_json(store, source);
	hex = json_string_value(json_object_get(text, "index"));
	err = hex && !digest_from_hex(hex, expected) ? 0 : -EUCLEAN;
	json_decref(text);
	/* A connection of its own: windows may be many, and reads need the others. */
	if (!err)
		err = store_file_connect(store, &db, &error);
	if (!err)
		err = digest_of(db, source->id, found);
	sqlite3_close(db);
	if (err)
		return err;
	return memcmp(expected, found, sizeof(found)) ? -EUCLEAN : 0;
}
