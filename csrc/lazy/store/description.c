/* SPDX-License-Identifier: MIT */
/*
 * The description of a source, made canonical: what was left out is filled in, "mirrors" is a list,
 * and the digests are gone but for their root. Sources whose descriptions are the same text are the
 * same source.
 */
#include <errno.h>
#include <inttypes.h>
#include <openssl/sha.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "base/cleanup.h"
#include "lazy/keys.h"
#include "lazy/store/internal.h"

enum { PROBE_MS = 30 * 1000 };

/* Of a size that is not known yet; any that the kinds take. */
static const json_int_t some_size = 4096;

static const char *const of_source[] = { "size", "unit", "root", "digests" };

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

static int name_of(const json_t *text, uint8_t name[static NAME_BYTES])
{
	_cleanup_free_ char *words = json_dumps(text, JSON_COMPACT | JSON_SORT_KEYS);

	if (!words)
		return -ENOMEM;
	SHA256((const unsigned char *)words, strlen(words), name);
	return 0;
}

/* What the kinds take: neither digests nor root. */
static int parse(const json_t *text, struct source **source, struct complaint *complaint)
{
	json_t *keys = json_copy((json_t *)text);
	int err;

	if (!keys)
		return complain(complaint, -ENOMEM, "no memory for a source");
	json_object_del(keys, "digests");
	json_object_del(keys, "root");
	err = source_parse(keys, source, complaint);
	json_decref(keys);
	return err;
}

/* The source's number in the map; 0: it is not there; or a negative errno. For the writer. */
static sqlite3_int64 find(struct store *store, const char *query, const uint8_t *name)
{
	_cleanup_sql_ sqlite3_stmt *statement = NULL;
	int err = sql_prepare(store->writer, query, &statement);

	if (!err) {
		sqlite3_bind_blob(statement, 1, name, NAME_BYTES, SQLITE_STATIC);
		err = sql_step(statement);
	}
	return err == 1 ? sqlite3_column_int64(statement, 0) : err;
}

/* The same mirrors were added without a size before: it need not be asked for again. */
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

/* Who cannot be reached, or has no such object, would not serve it by a known size either. */
static const char *hint_for(int err)
{
	switch (err) {
	case -ENOENT:
	case -EHOSTUNREACH:
	case -ETIMEDOUT:
	case -EIO:
		return "check the address; does the server run?";
	default:
		return "or give its \"size\"";
	}
}

/* The first mirror that answers has the word. */
static int ask_size(struct new_source *made, uint64_t *size, struct complaint *complaint)
{
	struct complaint of_first = {};
	int err = -EINVAL, err_of_first = 0;

	for (unsigned i = 0; i < made->source->mirror_count; i++) {
		struct mirror *mirror = &made->source->mirrors[i];
		struct mirror_probe probe = {};
		struct complaint why = {};

		if (!mirror->ops->probe)
			return complain(complaint, -EINVAL, "\"size\" is missing");
		err = mirror->ops->probe(mirror, PROBE_MS, &probe, &why);
		if (!err) {
			made->probed = i;
			made->identity = probe.identity;
			*size = probe.size;
			return 0;
		}
		if (!i) {
			of_first = why;
			err_of_first = err;
		}
	}
	complaint_hint(complaint, "%s", *of_first.hint ? of_first.hint : hint_for(err_of_first));
	return complain(complaint, err, "cannot ask for the size: %s",
			*of_first.text ? of_first.text : strerror(-err));
}

/* Parsed for the mirrors only; again, once the size is known. */
static int find_size(struct store *store, struct new_source *made, struct complaint *complaint)
{
	uint64_t size;
	int err;

	pthread_mutex_lock(&store->write_lock);
	err = find_known(store, made);
	if (err)
		sql_complain(store->writer, "read", complaint);
	pthread_mutex_unlock(&store->write_lock);
	if (err || made->known)
		return err;
	err = ask_size(made, &size, complaint);
	if (err)
		return err;
	if (!size || size > INT64_MAX)
		return complain(complaint, -EINVAL, "the source has %" PRIu64 " bytes", size);
	source_free(made->source);
	made->source = NULL;
	if (json_object_set_new(made->text, "size", json_integer((json_int_t)size)))
		return complain(complaint, -ENOMEM, "no memory for a source");
	return parse(made->text, &made->source, complaint);
}

/* "root" is what was given, and what comes of the digests: both must be the same. */
static int take_root(struct new_source *made, struct complaint *complaint)
{
	char hex[2 * SOURCE_DIGEST_BYTES + 1];
	const char *given;
	json_t *root = json_object_get(made->text, "root");
	int err = digest_list_take(made->text, made->source, &made->list, complaint);

	if (err)
		return err;
	given = json_string_value(root);
	if (root && (!given || digest_from_hex(given, made->source->key)))
		return complain(complaint, -EINVAL,
				"\"root\" is not %d hexadecimal digits (0-9a-f)",
				2 * SOURCE_DIGEST_BYTES);
	if (root && made->source->computed)
		return complain(complaint, -EINVAL, "a computed source has no digests");
	made->source->has_digests = root || made->list.count;
	if (!made->list.count)
		return 0;
	digest_to_hex(made->list.root, hex);
	if (given && memcmp(made->source->key, made->list.root, SOURCE_KEY_BYTES) != 0) {
		complaint_hint(complaint,
			       "the root covers the size (%" PRIu64 ") and the unit (%u), "
			       "too",
			       made->source->size, made->source->unit_bytes);
		return complain(complaint, -EINVAL, "\"root\" is %s, but the digests have %s",
				given, hex);
	}
	memcpy(made->source->key, made->list.root, SOURCE_KEY_BYTES);
	return json_object_set_new(made->text, "root", json_string(hex)) ?
		       complain(complaint, -ENOMEM, "no memory for a source") :
		       0;
}

/* Not with digests: they say what the content is, and only with them it is the same source. */
static int name_unsized(struct new_source *made)
{
	json_object_del(made->text, "size");
	made->has_unsized = !json_object_get(made->text, "digests");
	return name_of(made->text, made->unsized);
}

static int init(struct store *store, struct new_source *made, struct complaint *complaint)
{
	bool sized = json_object_get(made->text, "size");
	int err = list_mirror(made->text);

	if (!err && !sized)
		err = json_object_set_new(made->text, "size", json_integer(some_size)) ? -ENOMEM :
											 0;
	if (err)
		return complain(complaint, err, "no memory for a source");
	err = parse(made->text, &made->source, complaint);
	if (err)
		return err;
	if (json_object_set_new(made->text, "unit", json_integer(made->source->unit_bytes)))
		return complain(complaint, -ENOMEM, "no memory for a source");
	if (!sized) {
		err = name_unsized(made);
		if (!err)
			err = find_size(store, made, complaint);
		if (err || made->known)
			return err;
	}
	err = take_root(made, complaint);
	if (err)
		return err;
	if (source_units(made->source) / DIGESTS_PER_PAGE >> DIGEST_PAGE_BITS)
		return complain(complaint, -EINVAL,
				"%" PRIu64 " bytes are too many for units of %u",
				made->source->size, made->source->unit_bytes);
	return name_of(made->text, made->name);
}

int new_source_init(struct store *store, const json_t *description, struct new_source *made,
		    struct complaint *complaint)
{
	*made = (struct new_source){};
	if (!json_is_object(description))
		return complain(complaint, -EINVAL, "a source must be a JSON object");
	made->text = json_copy((json_t *)description);
	if (!made->text)
		return complain(complaint, -ENOMEM, "no memory for a source");
	return init(store, made, complaint);
}

void new_source_deinit(struct new_source *made)
{
	source_free(made->source);
	json_decref(made->text);
	digest_list_deinit(&made->list);
	free(made->identity);
}

static bool has_list(const struct store *store, const struct source *source, uint64_t list)
{
	const struct source *other = list <= store->source_count ? store->sources[list - 1] : NULL;

	return other && other->size == source->size && other->unit_bytes == source->unit_bytes;
}

/* The list that a source's digests are in: another one's of the same root, or its own. */
static int store_list(struct store *store, const struct new_source *made, uint64_t id,
		      sqlite3_int64 *list, struct complaint *complaint)
{
	*list = find(store, "SELECT list FROM sources WHERE key = ?1 AND list IS NOT NULL",
		     made->source->key);
	if (*list < 0)
		return sql_complain(store->writer, "read", complaint);
	/* A root that was computed covers size and unit; of one that was given we do not know. */
	if (*list && (made->list.count || has_list(store, made->source, (uint64_t)*list)))
		return 0;
	if (!made->list.count) {
		complaint_hint(complaint, "give them: \"digests\"");
		return complain(complaint, -EINVAL,
				"a \"root\" without digests, and the map has none that belong to "
				"it");
	}
	*list = (sqlite3_int64)id;
	return digest_list_store(&made->list, made->source, store, id, complaint);
}

static int insert(struct store *store, const struct new_source *made, uint64_t id,
		  sqlite3_int64 list)
{
	_cleanup_free_ char *text = json_dumps(made->text, JSON_COMPACT | JSON_SORT_KEYS);
	_cleanup_sql_ sqlite3_stmt *statement = NULL;
	int err = sql_prepare(store->writer, "INSERT INTO sources VALUES(?1, ?2, ?3, ?4, ?5)",
			      &statement);

	if (err || !text)
		return err ?: -ENOMEM;
	sqlite3_bind_int64(statement, 1, (sqlite3_int64)id);
	sqlite3_bind_blob(statement, 2, made->name, NAME_BYTES, SQLITE_STATIC);
	sqlite3_bind_text(statement, 3, text, -1, SQLITE_STATIC);
	sqlite3_bind_blob(statement, 4, made->source->key, SOURCE_KEY_BYTES, SQLITE_STATIC);
	if (list)
		sqlite3_bind_int64(statement, 5, list);
	return sql_do(statement);
}

static int insert_unsized(struct store *store, const struct new_source *made, uint64_t id)
{
	_cleanup_sql_ sqlite3_stmt *statement = NULL;
	int err = sql_prepare(store->writer, "INSERT OR IGNORE INTO unsized VALUES(?1, ?2)",
			      &statement);

	if (err)
		return err;
	sqlite3_bind_blob(statement, 1, made->unsized, NAME_BYTES, SQLITE_STATIC);
	sqlite3_bind_int64(statement, 2, (sqlite3_int64)id);
	return sql_do(statement);
}

/* What the mirror said of itself belongs to the size that it said. */
static int insert_identity(struct store *store, const struct new_source *made, uint64_t id)
{
	if (!made->identity)
		return 0;
	sqlite3_bind_int64(store->add_identity, 1, (sqlite3_int64)id);
	sqlite3_bind_int64(store->add_identity, 2, made->probed);
	sqlite3_bind_text(store->add_identity, 3, made->identity, -1, SQLITE_STATIC);
	return sql_do(store->add_identity);
}

static int store_new(struct store *store, struct new_source *made, uint64_t id,
		     struct complaint *complaint)
{
	sqlite3_int64 list = 0;
	int err = 0;

	if (made->source->has_digests)
		err = store_list(store, made, id, &list, complaint);
	else if (getrandom(made->source->key, SOURCE_KEY_BYTES, 0) != SOURCE_KEY_BYTES)
		err = complain(complaint, -EIO, "cannot get random bytes");
	if (err)
		return err;
	err = insert(store, made, id, list);
	if (!err)
		err = insert_identity(store, made, id);
	if (err)
		return sql_complain(store->writer, "write to", complaint) ?: err;
	if (made->identity) {
		made->source->mirrors[made->probed].identity = made->identity;
		made->identity = NULL;
	}
	made->source->id = id;
	return 0;
}

int new_source_store(struct store *store, struct new_source *made, uint64_t id,
		     struct complaint *complaint)
{
	sqlite3_int64 found;
	int err;

	if (made->known)
		return 0;
	found = find(store, "SELECT id FROM sources WHERE name = ?1", made->name);
	if (found < 0)
		return sql_complain(store->writer, "read", complaint);
	made->id = found ? (uint64_t)found : id;
	/* Or it is another one of the same request. */
	if (found && made->id <= store->source_count)
		made->known = store->sources[found - 1];
	err = found ? 0 : store_new(store, made, id, complaint);
	if (err || !made->has_unsized)
		return err;
	err = insert_unsized(store, made, made->id);
	return err ? sql_complain(store->writer, "write to", complaint) : 0;
}
