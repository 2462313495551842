/* SPDX-License-Identifier: MIT */
/* What the parts of the store share. */
#pragma once

#include <pthread.h>
#include <stdbool.h>
#include <string.h>

#include "base/hex.h"
#include "content/store.h"
#include "content/store/sql.h"

enum {
	STORE_VERSION = 1,	      /* of new maps */
	STORE_VERSION_CODED = 2,      /* with what only newer servers understand */
	STORE_VERSION_UNFINISHED = 3, /* while it has a part of a request; see slices.c */
	STORE_APPLICATION_ID = 0x62756d70,
	/* as many as fit a page of SQLite's, so that a lookup reads one page */
	DIGESTS_PER_PAGE = 126,
	/* In memory: 8 MiB, for 258,048 units. A page may be at so many places. */
	DIGEST_PAGES_KEPT = 2048,
	DIGEST_PAGE_PLACES = 8,
	DIGEST_PAGE_BITS = 32,
	NAME_BYTES = 32,
	STORE_SLICE_BYTES = 1 << 20, /* so that a slow disk is not long about it; see slices.c */
};

/* Of SQLite's cache of pages, in KiB, less than 0. */
#define STORE_CACHE_SIZE "-512"

struct pin;

/* Pins that wait for a commit, and whether a thread is doing it. */
struct pin_queue {
	pthread_mutex_t lock;
	pthread_cond_t done;
	struct pin *first;
	struct pin **end;
	bool has_leader;
};

/* What is left of a request, for those who load the map: see slices.c. */
struct unfinished {
	uint64_t sources;    /* how many the map has without it */
	uint64_t (*runs)[2]; /* first and last offset of mappings that do not count */
	size_t count;
};

/* A request that is written; see slices.c. */
struct slices {
	const bool *over;	 /* or NULL */
	struct unfinished begun; /* what there is to undo */
	uint64_t until_ns;
	uint64_t bytes, most_bytes; /* of this slice */
	int err;
	bool is_unfinished; /* a part of a request is in the file */
	bool has_large_cache;
};

/* A page in memory. No source has number 0. */
struct digest_page {
	uint64_t source, number;
	uint64_t used; /* by store->page_uses */
	unsigned count;
	uint8_t *digests;
};

struct store {
	char *path;
	struct map *map;
	const struct store_fetch_ops *ops;
	struct fetcher *fetcher; /* or NULL */

	/*
	 * There are two connections, so that a large addition does not delay a read that needs a
	 * digest. Each lock protects a connection and its statements. `write_lock` also protects
	 * the sources. Only the holder of `add_lock`, which comes first, may add to the map and to
	 * the sources: to read the latter takes one of both.
	 */
	pthread_mutex_t add_lock, write_lock, read_lock;
	struct slices slices;	      /* of the holder of add_lock */
	struct unfinished unfinished; /* while it is loaded */
	sqlite3 *writer, *reader;
	sqlite3_stmt *find_digest, *find_pin;	/* reader */
	sqlite3_stmt *add_pin, *add_identity;	/* writer */
	sqlite3_stmt *same_pin, *same_identity; /* writer */

	struct source **sources; /* number `id` is sources[id - 1] */
	uint64_t source_count;
	size_t source_room;
	bool has_caches; /* of its sources, when it was loaded */
	struct pin_queue pins;

	pthread_mutex_t pages_lock; /* held for at most the copy of one page */
	uint64_t page_uses;
	struct digest_page pages[DIGEST_PAGES_KEPT];
};

static inline pthread_mutex_t *store_lock(pthread_mutex_t *lock)
{
	pthread_mutex_lock(lock);
	return lock;
}

static inline void cleanup_unlock(pthread_mutex_t **lock)
{
	pthread_mutex_unlock(*lock);
}

/* Unlocks at the end of the scope: declare it first, so that statements are finalized before. */
#define _cleanup_unlock_ __attribute__((cleanup(cleanup_unlock), unused))

/* file.c: the file's connections and tables. */
int store_file_open(struct store *store, const char *path, struct error *error);
void store_file_close(struct store *store);
/*
 * Opens one more connection of this process. If `*db` is not NULL, it must be closed even after a
 * failure.
 */
int store_file_connect(const struct store *store, sqlite3 **db, struct error *error);
/* Ends a transaction that is left, as memory was too short to roll it back. Returns 0 or -ENOMEM. */
int store_end_last(struct store *store);
/* Does that, and begins a transaction of the writer. Returns 0 or a negative errno. */
int store_begin(struct store *store);
/* Ends the writer's transaction. Returns 0, or a negative errno when nothing of it was written. */
int store_commit(struct store *store);
void store_rollback(struct store *store);
/* Tells whether the map has a table of that name: 1 or 0, or a negative errno. */
int store_has_table(sqlite3 *db, const char *name);

/*
 * texts.c: leaves out the device's number, which identities of files have in maps of earlier
 * versions.
 */
const char *store_identity_of(const char *text);

/*
 * slices.c: writes a request in short transactions: all count, or none. All but
 * slice_pass() are for the holder of add_lock, and take write_lock themselves.
 */
int slice_begin(struct store *store, const struct map *batch, const bool *over);
/*
 * To be called after each row of about `bytes` that was written: it may end a transaction, let pins
 * by, and begin another. Returns a negative errno, or -ECANCELED when `*over` is set.
 */
int slice_pass(struct store *store, uint64_t bytes);
/* Ends the request: all counts if `err` is 0, else nothing. */
int slice_end(struct store *store, int err, struct error *error);
/*
 * Removes what is left of a request that did not end. On a slow disk, that may take long, so it comes
 * before the next addition, and not before reads.
 */
int store_undo(struct store *store, struct error *error);

/* Returns 0 or a negative errno. Without any, `sources` is INT64_MAX. The caller frees the runs. */
int store_find_unfinished(sqlite3 *db, struct unfinished *found);

/* table.c: a hash table of numbers, by hashes of what has these numbers. */
#define TABLE_FREE UINT64_MAX
struct table {
	struct table_slot *slots;
	size_t room, used;
};
int table_init(struct table *table);
void table_deinit(struct table *table);
uint64_t table_hash(uint64_t hash, uint64_t more);
/* Makes room for one more. */
int table_reserve(struct table *table);
/*
 * Returns the place of the number with that hash for which `is` is true. If there is none, returns a
 * new one with TABLE_FREE, which stays free unless it is set.
 */
uint64_t *table_find(const struct table *table, uint64_t hash,
		     bool (*is)(const void *argument, uint64_t number), const void *argument);

/* load.c */
int store_load(struct store *store, struct error *error);
/* The checksum of a row of mappings, to detect flipped bits. */
uint32_t store_mapping_sum(uint64_t offset, uint64_t length, uint64_t source,
			   uint64_t source_offset);
/* Makes room for `count` more in store->sources. */
int store_reserve_sources(struct store *store, uint64_t count);

/* digests.c: the digests that came with a source, in memory or in a file. */
struct digest_list {
	uint64_t count; /* 0: none came */
	uint8_t *digests;
	char *path;
	uint8_t root[SOURCE_DIGEST_BYTES];
};

/*
 * Takes "digests" out of the keys of a source, and checks that they are as many as `source` has
 * units.
 */
int digest_list_take(json_t *keys, const struct source *source, struct digest_list *list,
		     struct error *error);
/*
 * Writes them to the pages that begin with `number`, in a transaction. They must still have the
 * same root.
 */
int digest_list_store(const struct digest_list *list, const struct source *source,
		      struct store *store, uint64_t number, struct error *error);
void digest_list_deinit(struct digest_list *list);
static inline bool digest_parse(const char *text, uint8_t digest[static SOURCE_DIGEST_BYTES])
{
	return strlen(text) == 2 * SOURCE_DIGEST_BYTES &&
	       hex_decode(text, digest, SOURCE_DIGEST_BYTES);
}

/* description.c: a source of a request, which the map may have already. */
struct new_source {
	struct source *source; /* parsed; its id is 0 while it is not in the map */
	struct source *known;  /* the identical one of the map, or of this request, or NULL */
	uint64_t id;	       /* of that one */
	bool is_used;
	json_t *text;		     /* canonical: mirrors, size, unit, root */
	uint8_t name[NAME_BYTES];    /* hash of the text */
	uint8_t unsized[NAME_BYTES]; /* hash of the text without its size, if none was given */
	bool has_unsized;
	struct digest_list list;
	bool size_is_wanted; /* the size must be asked for; call new_source_take_size() then */
	uint64_t size;	     /* the answer */
	bool is_empty;	     /* the answer was 0: there is nothing to map */
	unsigned probed;     /* the mirror that gave it */
	/* The index that came with it, of its codec, and its selection; see indexes.c. */
	uint8_t *index_file;
	uint64_t index_bytes;
	struct codec_index *index; /* until the source has it */
	uint8_t *selection_file;
	uint64_t selection_bytes;
	struct selection *selection;
	char *identity; /* the identity that it gave, or that came with the source, or NULL */
};

/*
 * Parses the description, and finds it if it was added without a size before. Holds write_lock only
 * briefly.
 */
int new_source_init(struct store *store, const json_t *description, struct new_source *made,
		    struct error *error);
int new_source_take_size(struct new_source *made, struct error *error);
/* Finds the identical ones in the map, where there are any. Holds write_lock, so not for many. */
int new_sources_find(struct store *store, struct new_source *sources, size_t count,
		     struct error *error);
/* Stores it as number `id`, or only what is new of one that is known, in a transaction. */
int new_source_store(struct store *store, struct new_source *made, struct error *error);
void new_source_deinit(struct new_source *made);

/*
 * sizes.c: asks for the missing sizes, several at a time. Returns 0, -ECANCELED (`*over`), or the
 * error of the first source that gave none; `*failed` is its index.
 */
int new_sources_ask(const struct store *store, struct new_source *sources, size_t count,
		    const bool *over, size_t *failed, struct error *error);

/*
 * indexes.c: takes the index of a new source from its file, and its selection if it has one, and sets
 * its size.
 */
int new_source_take_index(struct new_source *made, struct error *error);
/*
 * Checks that index and selection (which may be NULL) are the source's, which then owns them: both
 * become NULL.
 */
int source_set_index(struct store *store, struct source *source, struct codec_index **index,
		     struct selection **selection, struct error *error);
/* Checks that a source that the map does not have comes with what it needs. */
int new_source_check_index(const struct new_source *made, struct error *error);
/* Writes both as those of source `id`, in a transaction. */
int new_source_store_index(struct store *store, const struct new_source *made, uint64_t id);
int store_load_index(struct store *store, struct source *source, struct error *error);

/*
 * parts.c: files that sources are added with, which the map keeps in parts. The first part of a file
 * is its head, in pages; a table of its own has the others, by number.
 */
struct store_file_kind {
	const char *key;      /* in the source's text: its SHA-256 */
	uint64_t least, most; /* bytes */
	const char *tables;
	const char *insert_page; /* ?1: a number with that of the source, ?2: a part */
	const char *find_pages;	 /* of the source ?1, in the order of their numbers */
	const char *insert_part;
	const char *find_parts;
	const char *find_part;
};

/* What follows `most`. */
#define STORE_FILE_TABLES(pages, parts, number, data)                                 \
	"CREATE TABLE IF NOT EXISTS " pages                                           \
	"( page INTEGER PRIMARY KEY, part BLOB NOT NULL) STRICT;"                     \
	"CREATE TABLE IF NOT EXISTS " parts "( " number " INTEGER PRIMARY KEY, " data \
	" BLOB NOT NULL) STRICT;",                                                    \
		"INSERT INTO " pages " VALUES(?1, ?2)",                               \
		"SELECT part FROM " pages                                             \
		" WHERE page BETWEEN ?1 AND ?1 + 4294967295 ORDER BY page",           \
		"INSERT INTO " parts " VALUES(?1, ?2)",                               \
		"SELECT " data " FROM " parts " WHERE " number                        \
		" BETWEEN ?1 AND ?1 + 4294967295 ORDER BY " number,                   \
		"SELECT " data " FROM " parts " WHERE " number " = ?1"

/* Reads the file of that path to memory, and puts its digest into the text. */
int store_file_take(const struct store_file_kind *kind, const char *path, json_t *text,
		    uint8_t **data, uint64_t *bytes, struct error *error);
/*
 * Writes a file as that of source `id`, in a transaction: a head of so many bytes, and behind it
 * `count` parts of `part_bytes(of, number)`.
 */
int store_file_write(const struct store_file_kind *kind, struct store *store, uint64_t id,
		     const uint8_t *file, uint64_t head_bytes, uint64_t count,
		     uint32_t (*part_bytes)(const void *of, uint64_t number), const void *of);
/* Returns the head, malloc()ed, which has `most` bytes at most. */
int store_file_load_head(const struct store_file_kind *kind, struct store *store, uint64_t id,
			 uint64_t most, uint8_t **head, uint64_t *bytes, struct error *error);
/* Steps to a part: returns 0, or a negative errno where there is none. Under read_lock. */
int store_file_find_part(const struct store_file_kind *kind, struct store *store, uint64_t id,
			 uint64_t number, sqlite3_stmt **find);
/* Checks that the map still has the file whose digest is in the text of the source. */
int store_file_check(const struct store_file_kind *kind, struct store *store,
		     const struct source *source);

/*
 * caches.c: the caches in front of the mirrors of a source, which are no part of what it is. Returns
 * the text without them: a new reference, or NULL.
 */
json_t *store_text_without_caches(json_t *text);
/* Writes those of the text as those of source `id`, in a transaction. Without any, does nothing. */
int new_source_store_caches(struct store *store, const struct new_source *made);
/* Adds those of source `id` to its text, if `store->has_caches`, which the other one finds out. */
int store_look_for_caches(struct store *store);
int store_load_caches(struct store *store, uint64_t id, json_t *text);

/* pages.c; store_digest_at_hand() is in store.h */
void digest_page_keep(struct store *store, const struct source *source, uint64_t number,
		      const uint8_t *digests, size_t bytes);
void digest_pages_free(struct store *store);

/* pins.c */
/* Takes write_lock, after the pins that wait for it: for those who take it again and again. */
void store_lock_after_pins(struct store *store);
int pin_queue_init(struct pin_queue *queue);
void pin_queue_deinit(struct pin_queue *queue);
