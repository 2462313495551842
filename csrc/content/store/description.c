/* SPDX-License-Identifier: MIT */
/*
 * The canonical description of a source: defaults are filled in, "mirrors" is a list, and digests
 * are replaced by their root. Sources with the same canonical text are the same source.
 */
#include <errno.h>
#include <inttypes.h>
#include <openssl/evp.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "base/cleanup.h"
#include "base/json_text.h"
#include "base/keys.h"
#include "content/identity.h"
#include "content/layout.h"
#include "content/store/internal.h"

/* For a size that is not known yet; all kinds accept it. */
static const json_int_t some_size = 4096;

static const char *const of_source[] = { "size",  "unit",  "root",	 "digests",
					 "codec", "index", "coded_size", "selection" };

static bool is_of_source(const char *key)
{
	for (size_t i = 0; i < sizeof(of_source) / sizeof(*of_source); i++) {
		if (!strcmp(key, of_source[i]))
			return true;
	}
	return false;
}

/* {"kind": ..., KEYS} becomes {"mirrors": [{"kind": ..., KEYS}]}. */
static int list_mirror(json_t *text)
{
	json_t *mirror, *value;
	const char *key;
	void *next;

	if (json_object_get(text, "mirrors"))
		return 0;
	mirror = json_object();
	json_object_foreach_safe(text, next, key, value)
	{
		if (is_of_source(key))
			continue;
		if (json_object_set(mirror, key, value) || json_object_del(text, key)) {
			json_decref(mirror);
			return -ENOMEM;
		}
	}
	return json_object_set_new(text, "mirrors", json_pack("[o]", mirror)) ? -ENOMEM : 0;
}

/* What is kept of the text in the map: what the source is. Returns NULL when memory is short. */
static char *words_of(json_t *text)
{
	json_t *plain = store_text_without_caches(text);
	char *words = plain ? json_text_dump(plain, JSON_COMPACT | JSON_SORT_KEYS) : NULL;

	json_decref(plain);
	return words;
}

static int name_of(json_t *text, uint8_t name[static NAME_BYTES])
{
	_cleanup_free_ char *words = words_of(text);

	if (!words)
		return -ENOMEM;
	/* Not SHA256(), which needs memory as well and does not say when there is none. */
	return EVP_Digest(words, strlen(words), name, NULL, EVP_sha256(), NULL) ? 0 : -ENOMEM;
}

/*
 * Returns the source's number in the map, 0 when it is not there, or a negative errno. Uses the
 * writer's connection.
 */
static sqlite3_int64 find(struct store *store, const char *query, const uint8_t *name)
{
	_cleanup_sql_ sqlite3_stmt *statement = NULL;
	int err = sql_find(store->writer, &statement, query, "b", name, (size_t)NAME_BYTES);

	return err == 1 ? sqlite3_column_int64(statement, 0) : err;
}

/* If the same mirrors were added without a size before, do not ask for the size again. */
static int find_known(struct store *store, struct new_source *made)
{
	sqlite3_int64 id;

	if (!made->has_unsized)
		return 0;
	id = find(store, "SELECT source FROM unsized WHERE name = ?1", made->unsized);
	if (id < 0)
		return (int)id;
	if (id && (uint64_t)id <= store->source_count) {
		made->id = (uint64_t)id;
		made->known = store->sources[id - 1];
	}
	return 0;
}

static int look_up(struct store *store, struct new_source *made, struct error *error)
{
	int err;

	store_lock_after_pins(store);
	err = find_known(store, made);
	if (err)
		sql_error_set(store->writer, "read", error);
	pthread_mutex_unlock(&store->write_lock);
	return err;
}

/* A given "root" must equal the root of the digests. */
static int take_root(struct new_source *made, struct error *error)
{
	char hex[2 * SOURCE_DIGEST_BYTES + 1];
	const char *given;
	json_t *root = json_object_get(made->text, "root");
	int err = digest_list_take(made->text, made->source, &made->list, error);

	if (err)
		return err;
	given = json_string_value(root);
	if (root && (!given || !digest_parse(given, made->source->key)))
		return error_set(error, -EINVAL, "\"root\" is not %d hexadecimal digits (0-9a-f)",
				 2 * SOURCE_DIGEST_BYTES);
	if (root && made->source->computed)
		return error_set(error, -EINVAL, "a computed source has no digests");
	made->source->has_digests = root || made->list.count;
	if (!made->list.count)
		return 0;
	hex_encode(made->list.root, SOURCE_DIGEST_BYTES, hex);
	if (given && memcmp(made->source->key, made->list.root, SOURCE_KEY_BYTES) != 0) {
		error_set_hint(error,
			       "the root covers the size (%" PRIu64 ") and the unit (%u), "
			       "too",
			       made->source->size, made->source->unit_bytes);
		return error_set(error, -EINVAL, "\"root\" is %s, but the digests have %s", given,
				 hex);
	}
	memcpy(made->source->key, made->list.root, SOURCE_KEY_BYTES);
	return json_object_set_new(made->text, "root", json_string(hex)) ?
		       error_set(error, -ENOMEM, "no memory for a source") :
		       0;
}

/* Not with digests: they define the content, so only sources with the same ones are the same. */
static int name_unsized(struct new_source *made)
{
	json_object_del(made->text, "size");
	made->has_unsized = !json_object_get(made->text, "digests");
	return name_of(made->text, made->unsized);
}

static int finish(struct new_source *made, struct error *error)
{
	int err = take_root(made, error);

	if (err)
		return err;
	if (source_units(made->source) / DIGESTS_PER_PAGE >> DIGEST_PAGE_BITS)
		return error_set(error, -EINVAL, "%" PRIu64 " bytes are too many for units of %u",
				 made->source->size, made->source->unit_bytes);
	return name_of(made->text, made->name);
}

/*
 * "identity" is that of the object that the first mirror has, as a listing says it.
 * It is pinned, and another one makes another source. Its text stays one that older servers read.
 */
static int take_identity(struct new_source *made, struct error *error)
{
	json_t *given = json_object_get(made->text, "identity");
	const char *text = json_string_value(given);

	if (!given)
		return 0;
	if (!text || !identity_is_valid(text))
		return error_set(error, -EINVAL,
				 "\"identity\" is not \"etag ETAG\", \"modified DATE\" or "
				 "\"etag ETAG modified DATE\"");
	if (!json_object_get(made->text, "size"))
		return error_set(error, -EINVAL, "an \"identity\" needs a \"size\"");
	made->identity = strdup(text);
	if (!made->identity || json_object_del(made->text, "identity"))
		return error_set(error, -ENOMEM, "no memory for a source");
	return 0;
}

static int add_identity_to_name(struct new_source *made)
{
	int err = 0;

	if (!made->identity)
		return 0;
	if (json_object_set_new(made->text, "identity", json_string(made->identity)))
		return -ENOMEM;
	err = name_of(made->text, made->name);
	json_object_del(made->text, "identity");
	return err;
}

static int init(struct store *store, struct new_source *made, struct error *error)
{
	int err = new_source_take_index(made, error);
	bool sized = json_object_get(made->text, "size");

	if (err)
		return err;
	err = list_mirror(made->text);
	if (!err && !sized)
		err = json_object_set_new(made->text, "size", json_integer(some_size)) ? -ENOMEM :
											 0;
	if (err)
		return error_set(error, err, "no memory for a source");
	err = store_parse_source(made->text, &made->source, error);
	if (!err && made->index)
		err = source_set_index(store, made->source, &made->index, &made->selection, error);
	if (err)
		return err;
	if (json_object_set_new(made->text, "unit", json_integer(made->source->unit_bytes)))
		return error_set(error, -ENOMEM, "no memory for a source");
	if (sized)
		return finish(made, error) ?: add_identity_to_name(made);
	err = name_unsized(made);
	if (!err)
		err = look_up(store, made, error);
	made->size_is_wanted = !err && !made->known;
	return err;
}

static int refuse_digests_of_nothing(const struct new_source *made, struct error *error)
{
	static const char *const keys[] = { "digests", "root", "codec" };

	for (size_t i = 0; i < sizeof(keys) / sizeof(*keys); i++) {
		if (json_object_get(made->text, keys[i]))
			return error_set(error, -EINVAL,
					 "the object is empty (0 bytes), and has \"%s\"", keys[i]);
	}
	return 0;
}

/* It was parsed for its mirrors only; parse it again now that the size is known. */
int new_source_take_size(struct new_source *made, struct error *error)
{
	uint64_t size = made->size;
	int err;

	made->is_empty = !size;
	if (made->is_empty)
		return refuse_digests_of_nothing(made, error);
	if (size > INT64_MAX)
		return error_set(error, -EINVAL, "the source has %" PRIu64 " bytes", size);
	source_free(made->source);
	made->source = NULL;
	if (json_object_set_new(made->text, "size", json_integer((json_int_t)size)))
		return error_set(error, -ENOMEM, "no memory for a source");
	err = store_parse_source(made->text, &made->source, error);
	return err ?: finish(made, error);
}

int new_source_init(struct store *store, const json_t *description, struct new_source *made,
		    struct error *error)
{
	*made = (struct new_source){};
	if (!json_is_object(description))
		return error_set(error, -EINVAL, "a source must be a JSON object");
	made->text = json_copy((json_t *)description);
	if (!made->text)
		return error_set(error, -ENOMEM, "no memory for a source");
	return take_identity(made, error) ?: init(store, made, error);
}

void new_source_deinit(struct new_source *made)
{
	source_free(made->source);
	json_decref(made->text);
	digest_list_deinit(&made->list);
	free(made->identity);
	free(made->index_file);
	free(made->index);
	free(made->selection_file);
	free(made->selection);
}

static bool has_list(const struct store *store, const struct source *source, uint64_t list)
{
	const struct source *other = list <= store->source_count ? store->sources[list - 1] : NULL;

	return other && other->size == source->size && other->unit_bytes == source->unit_bytes;
}

/*
 * Finds the source whose list of digests this one uses: another source with the same root, or
 * itself.
 */
static int store_list(struct store *store, const struct new_source *made, uint64_t id,
		      sqlite3_int64 *list, struct error *error)
{
	*list = find(store, "SELECT list FROM sources WHERE key = ?1 AND list IS NOT NULL",
		     made->source->key);
	if (*list < 0)
		return sql_error_set(store->writer, "read", error);
	/* A computed root covers size and unit; a given one may not. */
	if (*list && (made->list.count || has_list(store, made->source, (uint64_t)*list)))
		return 0;
	if (!made->list.count) {
		error_set_hint(error, "add \"digests\"");
		return error_set(error, -EINVAL,
				 "a \"root\" without digests, and the map has none that belong to "
				 "it");
	}
	*list = (sqlite3_int64)id;
	return digest_list_store(&made->list, made->source, store, id, error);
}

static int insert(struct store *store, const struct new_source *made, uint64_t id,
		  sqlite3_int64 list)
{
	_cleanup_free_ char *text = words_of(made->text);

	if (!text)
		return -ENOMEM;
	return sql_run_with(store->writer, "INSERT INTO sources VALUES(?1, ?2, ?3, ?4, ?5)",
			    list ? "ibtbi" : "ibtb", id, made->name, (size_t)NAME_BYTES, text,
			    made->source->key, (size_t)SOURCE_KEY_BYTES, (uint64_t)list);
}

static int insert_unsized(struct store *store, const struct new_source *made, uint64_t id)
{
	return sql_run_with(store->writer, "INSERT OR IGNORE INTO unsized VALUES(?1, ?2)", "bi",
			    made->unsized, (size_t)NAME_BYTES, id);
}

/* Pins the identity that the mirror gave together with the size. */
static int insert_identity(struct store *store, const struct new_source *made, uint64_t id)
{
	if (!made->identity)
		return 0;
	sql_bind(store->add_identity, "iit", id, (uint64_t)made->probed, made->identity);
	return sql_do(store->add_identity);
}

static int store_new(struct store *store, struct new_source *made, uint64_t id, struct error *error)
{
	sqlite3_int64 list = 0;
	int err = 0;

	if (made->source->has_digests)
		err = store_list(store, made, id, &list, error);
	else if (getrandom(made->source->key, SOURCE_KEY_BYTES, 0) != SOURCE_KEY_BYTES)
		err = error_set(error, -EIO, "cannot get random bytes");
	if (err)
		return err;
	err = insert(store, made, id, list);
	if (!err)
		err = insert_identity(store, made, id);
	if (!err)
		err = new_source_store_index(store, made, id);
	if (err)
		return sql_error_set(store->writer, "write to", error) ?: err;
	if (made->identity) {
		made->source->mirrors[made->probed].identity = made->identity;
		made->identity = NULL;
	}
	return 0;
}

static int find_by_name(struct store *store, struct new_source *made, struct error *error)
{
	sqlite3_int64 found;

	if (made->known || made->is_empty)
		return 0;
	found = find(store, "SELECT id FROM sources WHERE name = ?1", made->name);
	if (found < 0) {
		sql_error_set(store->writer, "read", error);
		return (int)found;
	}
	if (found && (uint64_t)found <= store->source_count)
		made->known = store->sources[found - 1];
	if (found && !made->known)
		return error_set(error, -EUCLEAN,
				 "the map has source %lld, which this server has not added", found);
	made->id = (uint64_t)found;
	return 0;
}

int new_sources_find(struct store *store, struct new_source *sources, size_t count,
		     struct error *error)
{
	int err;

	store_lock_after_pins(store);
	/* NB: else it would find what did not come into the map. */
	err = store_end_last(store);
	for (size_t i = 0; i < count && !err; i++)
		err = find_by_name(store, &sources[i], error);
	pthread_mutex_unlock(&store->write_lock);
	return err;
}

int new_source_store(struct store *store, struct new_source *made, struct error *error)
{
	int err = 0;

	if (made->known == made->source)
		err = store_new(store, made, made->id, error);
	if (err)
		return err;
	if (made->has_unsized)
		err = insert_unsized(store, made, made->id);
	if (!err)
		err = new_source_store_caches(store, made);
	if (!err)
		err = slice_pass(store, 1024);
	return err ? sql_error_set(store->writer, "write to", error) ?: err : 0;
}
