/* SPDX-License-Identifier: MIT */
/* Lists of digests: how they are read and stored, and the root that covers them. */
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
#include "base/hex.h"
#include "base/keys.h"
#include "content/layout.h"
#include "content/store/internal.h"

/* A worker that is woken for one page of a small source brings its neighbours too. */
enum { PAGES_AT_ONCE = 32 };

static const char root_header[] = "btrfs-ublk units 1\n";

static void cleanup_context(EVP_MD_CTX **context)
{
	EVP_MD_CTX_free(*context);
}

#define _cleanup_context_ __attribute__((cleanup(cleanup_context)))

static EVP_MD_CTX *root_begin(const struct source *source)
{
	const uint64_t size = htole64(source->size);
	const uint32_t unit = htole32(source->unit_bytes);
	EVP_MD_CTX *context = EVP_MD_CTX_new();

	if (context && EVP_DigestInit_ex(context, EVP_sha256(), NULL) &&
	    EVP_DigestUpdate(context, root_header, sizeof(root_header) - 1) &&
	    EVP_DigestUpdate(context, &size, sizeof(size)) &&
	    EVP_DigestUpdate(context, &unit, sizeof(unit)))
		return context;
	EVP_MD_CTX_free(context);
	return NULL;
}

/* Called for each page of a list. */
struct page {
	uint64_t number;
	size_t bytes;
	uint8_t data[DIGESTS_PER_PAGE * SOURCE_DIGEST_BYTES];
};

typedef int (*page_fn)(const struct page *page, void *argument);

/* Goes through the list; stores its hash in `root`. */
static int for_pages(const struct digest_list *list, const struct source *source, page_fn each,
		     void *argument, uint8_t root[static SOURCE_DIGEST_BYTES])
{
	_cleanup_close_ int fd = list->path ? open(list->path, O_RDONLY | O_CLOEXEC | O_NOCTTY) :
					      -1;
	_cleanup_context_ EVP_MD_CTX *context = root_begin(source);
	uint64_t bytes = list->count * SOURCE_DIGEST_BYTES, done = 0;
	struct page page = {};

	if (!context)
		return -ENOMEM;
	if (list->path && fd < 0)
		return -errno;
	for (; done < bytes; done += page.bytes, page.number++) {
		int err = 0;

		page.bytes = bytes - done < sizeof(page.data) ? bytes - done : sizeof(page.data);
		if (list->path)
			err = pread_full(fd, page.data, page.bytes, done);
		else
			memcpy(page.data, list->digests + done, page.bytes);
		if (!err && !EVP_DigestUpdate(context, page.data, page.bytes))
			err = -ENOMEM;
		if (!err && each)
			err = each(&page, argument);
		if (err)
			return err;
	}
	return EVP_DigestFinal_ex(context, root, NULL) ? 0 : -ENOMEM;
}

static int take_inline(const json_t *hexes, struct digest_list *list, struct error *error)
{
	list->count = json_array_size(hexes);
	list->digests = calloc(list->count ?: 1, SOURCE_DIGEST_BYTES);
	if (!list->digests)
		return error_set(error, -ENOMEM, "no memory for digests");
	for (uint64_t i = 0; i < list->count; i++) {
		const char *hex = json_string_value(json_array_get(hexes, i));

		if (!hex || !digest_parse(hex, list->digests + i * SOURCE_DIGEST_BYTES))
			return error_set(error, -EINVAL,
					 "digest %" PRIu64 " is not %d hexadecimal digits (0-9a-f)",
					 i, 2 * SOURCE_DIGEST_BYTES);
	}
	return 0;
}

static int look_at_file(struct digest_list *list, struct error *error)
{
	/* Do not wait for a writer if this is a FIFO. */
	_cleanup_close_ int fd = open(list->path, O_RDONLY | O_CLOEXEC | O_NOCTTY | O_NONBLOCK);
	struct stat status;

	if (*list->path != '/')
		return error_set(error, -EINVAL, "the path of digests '%s' is not absolute",
				 list->path);
	if (fd < 0 || fstat(fd, &status))
		return error_set(error, -errno, "cannot open digests '%s': %s", list->path,
				 strerror(errno));
	if (!S_ISREG(status.st_mode))
		return error_set(error, -EINVAL, "'%s' is no regular file", list->path);
	if (status.st_size % SOURCE_DIGEST_BYTES)
		return error_set(error, -EINVAL,
				 "'%s' has %lld bytes, no multiple of the %d of a digest",
				 list->path, (long long)status.st_size, SOURCE_DIGEST_BYTES);
	list->count = (uint64_t)status.st_size / SOURCE_DIGEST_BYTES;
	return 0;
}

static int take_list(json_t *digests, struct digest_list *list, struct error *error)
{
	json_t *keys;
	int err;

	if (json_is_array(digests))
		return take_inline(digests, list, error);
	if (!json_is_object(digests))
		return error_set(error, -EINVAL,
				 "\"digests\" must be a list of digests, or {\"path\": FILE}");
	keys = json_copy(digests);
	if (!keys)
		return error_set(error, -ENOMEM, "no memory for digests");
	err = keys_take_string(keys, "path", true, &list->path, error);
	if (!err)
		err = keys_refuse_unknown(keys, error);
	json_decref(keys);
	return err ?: look_at_file(list, error);
}

int digest_list_take(json_t *keys, const struct source *source, struct digest_list *list,
		     struct error *error)
{
	json_t *digests = json_object_get(keys, "digests");
	uint64_t units = source_units(source);
	int err;

	if (!digests)
		return 0;
	if (source->computed)
		return error_set(error, -EINVAL, "a computed source has no digests");
	err = take_list(digests, list, error);
	json_object_del(keys, "digests");
	if (err)
		return err;
	if (list->count != units)
		return error_set(error, -EINVAL,
				 "%" PRIu64 " digests for %" PRIu64 " units of %u bytes (%" PRIu64
				 " bytes in all)",
				 list->count, units, source->unit_bytes, source->size);
	err = for_pages(list, source, NULL, NULL, list->root);
	return err ? error_set(error, err, "cannot read digests%s%s: %s", list->path ? " " : "",
			       list->path ?: "", strerror(-err)) :
		     0;
}

void digest_list_deinit(struct digest_list *list)
{
	free(list->digests);
	free(list->path);
}

struct storing {
	struct store *store;
	sqlite3_stmt *insert;
	uint64_t number;
};

static int store_page(const struct page *page, void *argument)
{
	const struct storing *storing = argument;

	sql_bind(storing->insert, "ib", storing->number << DIGEST_PAGE_BITS | page->number,
		 page->data, page->bytes);
	return sql_do(storing->insert) ?: slice_pass(storing->store, page->bytes);
}

int digest_list_store(const struct digest_list *list, const struct source *source,
		      struct store *store, uint64_t number, struct error *error)
{
	_cleanup_sql_ sqlite3_stmt *insert = NULL;
	struct storing storing = { .store = store, .number = number };
	uint8_t root[SOURCE_DIGEST_BYTES];
	int err = sql_prepare(store->writer, "INSERT INTO digests VALUES(?1, ?2)", &insert);

	storing.insert = insert;
	if (!err)
		err = for_pages(list, source, store_page, &storing, root);
	if (err && sql_errno(store->writer))
		return sql_error_set(store->writer, "write digests to", error);
	if (err)
		return error_set(error, err, "cannot read digests %s: %s", list->path ?: "",
				 strerror(-err));
	if (memcmp(root, list->root, sizeof(root)) != 0)
		return error_set(error, -EINVAL, "the digests in '%s' have just changed",
				 list->path ?: "");
	return 0;
}

static int find_page(struct store *store, const struct source *source, uint64_t page,
		     uint64_t first, uint64_t count, uint8_t *digests, bool keep)
{
	sqlite3_stmt *find = store->find_digest;
	size_t bytes;
	int err;

	sql_bind(find, "ii", source->id, page);
	err = sql_step(find);
	bytes = err == 1 ? (size_t)sqlite3_column_bytes(find, 0) : 0;
	if (bytes >= (first + count) * SOURCE_DIGEST_BYTES) {
		const uint8_t *list = sqlite3_column_blob(find, 0);

		memcpy(digests, list + first * SOURCE_DIGEST_BYTES, count * SOURCE_DIGEST_BYTES);
		if (keep && bytes <= DIGESTS_PER_PAGE * SOURCE_DIGEST_BYTES)
			digest_page_keep(store, source, page, list, bytes);
		err = 0;
	} else if (err >= 0) {
		err = -EUCLEAN;
	}
	sqlite3_reset(find);
	return err;
}

static int find_pin(struct store *store, const struct source *source, uint64_t unit,
		    uint8_t digest[static SOURCE_DIGEST_BYTES])
{
	sqlite3_stmt *find = store->find_pin;
	int found;

	sql_bind(find, "ii", source->id, unit);
	found = sql_step(find);
	if (found == 1 && sqlite3_column_bytes(find, 0) == SOURCE_DIGEST_BYTES)
		memcpy(digest, sqlite3_column_blob(find, 0), SOURCE_DIGEST_BYTES);
	else if (found == 1)
		found = -EUCLEAN;
	sqlite3_reset(find);
	return found;
}

int store_digest(struct store *store, const struct source *source, uint64_t unit,
		 uint8_t digest[static SOURCE_DIGEST_BYTES])
{
	int found;

	pthread_mutex_lock(&store->read_lock);
	if (source->has_digests) {
		found = find_page(store, source, unit / DIGESTS_PER_PAGE, unit % DIGESTS_PER_PAGE,
				  1, digest, true);
		if (!found)
			found = 1;
	} else {
		found = find_pin(store, source, unit, digest);
	}
	pthread_mutex_unlock(&store->read_lock);
	return found;
}

void store_load_digests(struct store *store, const struct source *source, uint64_t unit)
{
	uint64_t wanted = unit / DIGESTS_PER_PAGE,
		 pages = source_units(source) / DIGESTS_PER_PAGE + 1;
	uint64_t first = wanted & ~(PAGES_AT_ONCE - 1ull), last = first + PAGES_AT_ONCE;
	uint8_t unused[SOURCE_DIGEST_BYTES];

	store_digest(store, source, unit, unused);
	/* NB: those of a large source would take each other's place before they are of use. */
	if (pages > DIGEST_PAGES_KEPT)
		return;
	for (uint64_t page = first; page < last; page++) {
		unit = page * DIGESTS_PER_PAGE;
		if (page != wanted && unit < source_units(source) &&
		    !store_digest_at_hand(store, source, unit, unused))
			store_digest(store, source, unit, unused);
	}
}

int store_check_digests(struct store *store, const struct source *source)
{
	_cleanup_context_ EVP_MD_CTX *context = root_begin(source);
	uint8_t page[DIGESTS_PER_PAGE * SOURCE_DIGEST_BYTES], root[SOURCE_DIGEST_BYTES];
	uint64_t rest = source_units(source);

	if (!context)
		return -ENOMEM;
	for (uint64_t number = 0; rest; number++) {
		uint64_t count = rest < DIGESTS_PER_PAGE ? rest : DIGESTS_PER_PAGE;
		int err;

		/* Lock for each page only, because readers need the lock too. */
		pthread_mutex_lock(&store->read_lock);
		err = find_page(store, source, number, 0, count, page, false);
		pthread_mutex_unlock(&store->read_lock);
		if (err)
			return err;
		if (!EVP_DigestUpdate(context, page, count * SOURCE_DIGEST_BYTES))
			return -ENOMEM;
		rest -= count;
	}
	if (!EVP_DigestFinal_ex(context, root, NULL))
		return -ENOMEM;
	return memcmp(root, source->key, sizeof(root)) ? -EUCLEAN : 0;
}
