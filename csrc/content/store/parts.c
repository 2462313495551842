/* SPDX-License-Identifier: MIT */
/* Files that sources are added with, as a map keeps them: in pages and other parts. */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <openssl/evp.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/array.h"
#include "base/cleanup.h"
#include "base/fileio.h"
#include "content/store/internal.h"

enum { HEAD_PAGE_BYTES = 4032 };

static int read_file(const struct store_file_kind *kind, const char *path, uint8_t **data,
		     uint64_t *bytes, struct error *error)
{
	/* Do not wait for a writer if this is a FIFO. */
	_cleanup_close_ int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOCTTY | O_NONBLOCK);
	struct stat status;
	int err;

	if (*path != '/')
		return error_set(error, -EINVAL, "the path of the %s '%s' is not absolute",
				 kind->key, path);
	if (fd < 0 || fstat(fd, &status))
		return error_set(error, -errno, "cannot open %s '%s': %s", kind->key, path,
				 strerror(errno));
	if (!S_ISREG(status.st_mode))
		return error_set(error, -EINVAL, "'%s' is no regular file", path);
	if ((uint64_t)status.st_size < kind->least || (uint64_t)status.st_size > kind->most)
		return error_set(error, -EINVAL, "'%s' has %lld bytes: it is no %s", path,
				 (long long)status.st_size, kind->key);
	*bytes = (uint64_t)status.st_size;
	*data = malloc(*bytes);
	err = *data ? pread_full(fd, *data, *bytes, 0) : -ENOMEM;
	return err ? error_set(error, err, "cannot read %s '%s': %s", kind->key, path,
			       strerror(-err)) :
		     0;
}

int store_file_take(const struct store_file_kind *kind, const char *path, json_t *text,
		    uint8_t **data, uint64_t *bytes, struct error *error)
{
	uint8_t digest[SOURCE_DIGEST_BYTES];
	char hex[2 * SOURCE_DIGEST_BYTES + 1];
	int err = read_file(kind, path, data, bytes, error);

	if (err)
		return err;
	if (!EVP_Digest(*data, *bytes, digest, NULL, EVP_sha256(), NULL))
		return error_set(error, -ENOMEM, "no memory for a digest");
	hex_encode(digest, sizeof(digest), hex);
	return json_object_set_new(text, kind->key, json_string(hex)) ?
		       error_set(error, -ENOMEM, "no memory for a source") :
		       0;
}

static int insert(struct store *store, sqlite3_stmt *statement, uint64_t id, uint64_t number,
		  const uint8_t *data, uint64_t bytes)
{
	sql_bind(statement, "ib", id << DIGEST_PAGE_BITS | number, data, (size_t)bytes);
	return sql_do(statement) ?: slice_pass(store, bytes);
}

static int insert_pages(const struct store_file_kind *kind, struct store *store, uint64_t id,
			const uint8_t *head, uint64_t bytes)
{
	_cleanup_sql_ sqlite3_stmt *page = NULL;
	int err = sql_prepare(store->writer, kind->insert_page, &page);

	for (uint64_t done = 0; !err && done < bytes; done += HEAD_PAGE_BYTES)
		err = insert(store, page, id, done / HEAD_PAGE_BYTES, head + done,
			     bytes - done < HEAD_PAGE_BYTES ? bytes - done : HEAD_PAGE_BYTES);
	return err;
}

int store_file_write(const struct store_file_kind *kind, struct store *store, uint64_t id,
		     const uint8_t *file, uint64_t head_bytes, uint64_t count,
		     uint32_t (*part_bytes)(const void *of, uint64_t number), const void *of)
{
	_cleanup_sql_ sqlite3_stmt *part = NULL;
	const uint8_t *at = file + head_bytes;
	int err = sql_run(store->writer, kind->tables);

	if (!err)
		err = insert_pages(kind, store, id, file, head_bytes);
	if (!err)
		err = sql_prepare(store->writer, kind->insert_part, &part);
	for (uint64_t i = 0; !err && i < count; i++) {
		uint32_t bytes = part_bytes(of, i);

		if (bytes)
			err = insert(store, part, id, i, at, bytes);
		at += bytes;
	}
	return err;
}

typedef int (*part_fn)(const void *data, size_t bytes, void *argument);

static int for_parts(sqlite3 *db, const char *query, uint64_t id, part_fn each, void *argument)
{
	_cleanup_sql_ sqlite3_stmt *find = NULL;
	int err = sql_prepare(db, query, &find);

	if (err)
		return err;
	sql_bind(find, "i", id << DIGEST_PAGE_BITS);
	while ((err = sql_step(find)) == 1) {
		err = each(sqlite3_column_blob(find, 0), (size_t)sqlite3_column_bytes(find, 0),
			   argument);
		if (err)
			return err;
	}
	return err;
}

struct head {
	uint8_t *data;
	uint64_t bytes, most;
	size_t room;
};

static int append(const void *data, size_t bytes, void *argument)
{
	struct head *head = argument;

	if (head->bytes + bytes > head->most)
		return -EUCLEAN;
	if (array_reserve(head->data, head->room, head->bytes + bytes))
		return -ENOMEM;
	if (bytes)
		memcpy(head->data + head->bytes, data, bytes);
	head->bytes += bytes;
	return 0;
}

int store_file_load_head(const struct store_file_kind *kind, struct store *store, uint64_t id,
			 uint64_t most, uint8_t **data, uint64_t *bytes, struct error *error)
{
	struct head head = { .data = malloc(1), .room = 1, .most = most };
	int err = head.data ? for_parts(store->reader, kind->find_pages, id, append, &head) :
			      -ENOMEM;

	*data = head.data;
	*bytes = head.bytes;
	return err ? error_set(error, err, "cannot load the %s of source %" PRIu64 ": %s",
			       kind->key, id, strerror(-err)) :
		     0;
}

int store_file_find_part(const struct store_file_kind *kind, struct store *store, uint64_t id,
			 uint64_t number, sqlite3_stmt **find)
{
	int found = sql_find(store->reader, find, kind->find_part, "i",
			     id << DIGEST_PAGE_BITS | number);

	return found == 1 ? 0 : found ?: -EUCLEAN;
}

static int add_to_digest(const void *data, size_t bytes, void *argument)
{
	return EVP_DigestUpdate(argument, data, bytes) ? 0 : -ENOMEM;
}

static int digest_of(const struct store_file_kind *kind, sqlite3 *db, uint64_t id,
		     uint8_t digest[static SOURCE_DIGEST_BYTES])
{
	EVP_MD_CTX *context = EVP_MD_CTX_new();
	int err = context && EVP_DigestInit_ex(context, EVP_sha256(), NULL) ? 0 : -ENOMEM;

	if (!err)
		err = for_parts(db, kind->find_pages, id, add_to_digest, context);
	if (!err)
		err = for_parts(db, kind->find_parts, id, add_to_digest, context);
	if (!err && !EVP_DigestFinal_ex(context, digest, NULL))
		err = -ENOMEM;
	EVP_MD_CTX_free(context);
	return err;
}

int store_file_check(const struct store_file_kind *kind, struct store *store,
		     const struct source *source)
{
	uint8_t expected[SOURCE_DIGEST_BYTES], found[SOURCE_DIGEST_BYTES];
	json_t *text = store_source_json(store, source);
	const char *hex = json_string_value(json_object_get(text, kind->key));
	struct error error = {};
	sqlite3 *db = NULL;
	int err = hex && digest_parse(hex, expected) ? 0 : -EUCLEAN;

	json_decref(text);
	/* A connection of its own: parts may be many, and reads need the others. */
	if (!err)
		err = store_file_connect(store, &db, &error);
	if (!err)
		err = digest_of(kind, db, source->id, found);
	sqlite3_close(db);
	if (err)
		return err;
	return memcmp(expected, found, sizeof(found)) ? -EUCLEAN : 0;
}
