/* SPDX-License-Identifier: MIT */
/* What the parts of the store share. */
#ifndef LAZY_STORE_INTERNAL_H
#define LAZY_STORE_INTERNAL_H

#include <pthread.h>
#include <stdbool.h>

#include "lazy/store.h"
#include "lazy/store/sql.h"

enum {
	STORE_VERSION = 1,
	STORE_APPLICATION_ID = 0x62756d70,
	/* As many as fill a page of SQLite's, so that finding one reads one page. */
	DIGESTS_PER_PAGE = 126,
	DIGEST_PAGES_KEPT = 512, /* in memory: 2 MiB, of 64512 units */
	DIGEST_PAGE_BITS = 32,
	NAME_BYTES = 32,
};

struct pin;

/* Pins that wait for their commit, and who does it. */
struct pin_queue {
	pthread_mutex_t lock;
	pthread_cond_t done;
	struct pin *first;
	struct pin **end;
	bool has_leader;
};

/* In memory; number 0 is no source's. */
struct digest_page {
	uint64_t source, number;
	unsigned count;
	uint8_t *digests;
};

struct store {
	char *path;
	struct map *map;

	/*
	 * Two connections, so that a large addition does not keep a read waiting that needs a
	 * digest. Each lock is of the connection and its statements; `write_lock` also of the
	 * sources, and it makes its holder the one thread that may add to the map.
	 */
	pthread_mutex_t write_lock, read_lock;
	sqlite3 *writer, *reader;
	sqlite3_stmt *find_digest, *find_pin;	/* reader */
	sqlite3_stmt *add_pin, *add_identity;	/* writer */
	sqlite3_stmt *same_pin, *same_identity; /* writer */

	struct source **sources; /* number `id` is sources[id - 1] */
	uint64_t source_count, source_room;
	struct pin_queue pins;

	pthread_mutex_t pages_lock; /* held for a copy of one page, at most */
	struct digest_page pages[DIGEST_PAGES_KEPT];
};

/* file.c: the file's connections, with the tables that they should have. */
int store_file_open(struct store *store, const char *path, struct complaint *complaint);
void store_file_close(struct store *store);
/* One more connection of this process; to be closed also on failure, where it is not NULL. */
int store_file_connect(const struct store *store, sqlite3 **db, struct complaint *complaint);
/* Ends the writer's transaction; 0, or a negative errno and nothing of it is left. */
int store_commit(struct store *store);
void store_rollback(struct store *store);

/* load.c */
int store_load(struct store *store, struct complaint *complaint);
/* Of a row of mappings, to notice when one of its bits has turned. */
uint32_t store_mapping_sum(uint64_t offset, uint64_t length, uint64_t source,
			   uint64_t source_offset);
/* Room for `count` more in store->sources. */
int store_reserve_sources(struct store *store, uint64_t count);

/* digests.c: the digests that came with a source: in memory, or in a file. */
struct digest_list {
	uint64_t count; /* 0: none came */
	uint8_t *digests;
	char *path;
	uint8_t root[SOURCE_DIGEST_BYTES];
};

/* Takes "digests" out of the keys of a source, and checks their number for `source`. */
int digest_list_take(json_t *keys, const struct source *source, struct digest_list *list,
		     struct complaint *complaint);
/* To the pages that begin with `number`; in a transaction. They must have the root they had. */
int digest_list_store(const struct digest_list *list, const struct source *source,
		      struct store *store, uint64_t number, struct complaint *complaint);
void digest_list_deinit(struct digest_list *list);
int digest_from_hex(const char *hex, uint8_t digest[static SOURCE_DIGEST_BYTES]);
void digest_to_hex(const uint8_t digest[static SOURCE_DIGEST_BYTES],
		   char hex[static 2 * SOURCE_DIGEST_BYTES + 1]);

/* description.c: a source that is to be added, or is found to be there. */
struct new_source {
	struct source *source;	     /* parsed; its id is 0 as long as it is not in the map */
	struct source *known;	     /* the one in the map, instead */
	uint64_t id;		     /* in the map, after new_source_store() */
	json_t *text;		     /* canonical: mirrors, size, unit, root */
	uint8_t name[NAME_BYTES];    /* of the text */
	uint8_t unsized[NAME_BYTES]; /* of the text without its size, where that was not given */
	bool has_unsized;
	struct digest_list list;
	unsigned probed; /* the mirror that said the size */
	char *identity;	 /* what it said besides, or NULL */
};

/* Parse, and ask for the size where it is not given. Takes write_lock for moments only. */
int new_source_init(struct store *store, const json_t *description, struct new_source *made,
		    struct complaint *complaint);
/* In a transaction: find it in the map, or put it there, as number `id`. */
int new_source_store(struct store *store, struct new_source *made, uint64_t id,
		     struct complaint *complaint);
void new_source_deinit(struct new_source *made);

/* pages.c; store_digest_at_hand() is in store.h */
void digest_page_keep(struct store *store, const struct source *source, uint64_t number,
		      const uint8_t *digests, size_t bytes);
void digest_pages_free(struct store *store);

/* pins.c */
int pin_queue_init(struct pin_queue *queue);
void pin_queue_deinit(struct pin_queue *queue);

#endif
