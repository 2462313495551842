/* SPDX-License-Identifier: MIT */
/*
 * The map file: sources, mappings, digests and pins of one address space, durable (SQLite). It is
 * opened exclusively, by one server at a time. All calls but store_digest_at_hand() and
 * store_path() may wait for the disk, so neither queue threads nor the fetcher's thread may make
 * them. Any other thread may: mutexes protect the store.
 */
#pragma once

#include <jansson.h>
#include <stdint.h>

#include "base/error.h"
#include "content/map.h"
#include "content/source.h"

struct fetcher;
struct store;

/* What a store has of those who fetch, which are above it. */
struct store_fetch_ops {
	/* Has the mirrors of a source with an index decode: coded_wrap(). Returns 0 or -ENOMEM. */
	int (*decode)(struct source *source, struct store *store);
	/* mirror_probe() */
	int (*probe)(struct fetcher *fetcher, struct mirror *mirror, uint32_t timeout_ms,
		     struct mirror_probe *probe, struct error *error);
};

/*
 * Opens the map file at `path`, makes it where there is none, and loads its mappings into `map`.
 * Returns 0, or a negative errno with the error filled in: -EBUSY (another server has it),
 * -EPROTONOSUPPORT (of a newer version), -EUCLEAN (no map file, or damaged).
 */
int store_open(const char *path, struct map *map, const struct store_fetch_ops *ops,
	       struct store **store, struct error *error);
void store_close(struct store *store);
/*
 * Names the fetcher that asks servers for sizes: without one, sources of servers must come with
 * their size. To be called before anything is added.
 */
void store_use_fetcher(struct store *store, struct fetcher *fetcher);

/* One mapping of a request. */
struct store_addition {
	/* Inputs. */
	uint64_t offset; /* STORE_ANYWHERE: the lowest free range within store_room */
	uint64_t length; /* STORE_REST: all that the source has from source_offset on */
	uint64_t source_offset;
	unsigned source; /* index in the request's sources */
	/* Outputs. */
	bool existed;	      /* the same mapping was there already */
	uint64_t source_size; /* of all of its source, in bytes */
};

#define STORE_ANYWHERE UINT64_MAX
#define STORE_REST UINT64_MAX

struct store_room {
	uint64_t start, end; /* where STORE_ANYWHERE may put mappings; bytes, in the virtual data */
	uint64_t alignment;
	/* What devices show of the virtual data. Nobody could read a mapping outside of it. */
	uint64_t shown_start, shown_end;
};

/*
 * Adds all mappings or none. When this returns 0, they are synced and in the map. `sources` is an
 * array of JSON descriptions; `offset` and `length` of the additions are filled in. Returns -EEXIST
 * (the error names the mapping in the way), -EINVAL, -ENOSPC, -EIO, ...; or -ECANCELED when another
 * thread sets `*over` before all is written. `over` may be NULL. Requests come one after the other;
 * pins and reads do not wait for them.
 */
int store_add(struct store *store, const json_t *sources, struct store_addition *additions,
	      size_t count, const struct store_room *room, const bool *over, struct error *error);

/*
 * Looks up the digest that unit `unit` must have. Returns 1 and sets `digest`; 0 when none is
 * known, which does not happen for sources with digests; or a negative errno.
 */
int store_digest(struct store *store, const struct source *source, uint64_t unit,
		 uint8_t digest[static SOURCE_DIGEST_BYTES]);

/*
 * Does the same without ever waiting, so any thread may call it. Returns false when the digest is
 * not in memory, or none came with the source. store_digest() loads the neighbours of the digest
 * that it looks up.
 */
bool store_digest_at_hand(struct store *store, const struct source *source, uint64_t unit,
			  uint8_t digest[static SOURCE_DIGEST_BYTES]);
/* Reads the digest of a unit of a source with digests, and neighbours, so that they are at hand. */
void store_load_digests(struct store *store, const struct source *source, uint64_t unit);

/*
 * Pins the digest of a unit of a source without digests. It is synced on return (concurrent callers
 * share one sync). Returns 0, -ESTALE when another digest is pinned already, or another negative
 * errno.
 */
int store_pin_digest(struct store *store, const struct source *source, uint64_t unit,
		     const uint8_t digest[static SOURCE_DIGEST_BYTES]);
/* Does the same for the identity of a mirror. */
int store_pin_identity(struct store *store, const struct mirror *mirror, const char *identity);

/*
 * Returns the JSON description of a source as it was added, without digests: a new reference, or
 * NULL.
 */
json_t *store_source_json(struct store *store, const struct source *source);

/* The file's current name: absolute, with no symbolic links in its directory. */
const char *store_path(const struct store *store);
/*
 * Returns source number `id`, from 1 on, or NULL. Sources are never freed before the store is
 * closed.
 */
struct source *store_source(struct store *store, uint64_t id);
uint64_t store_source_count(struct store *store);
/*
 * Looks up a mirror's pinned identity. Returns 1 and sets `*identity`, which the caller frees; 0
 * when none is pinned; or a negative errno.
 */
int store_identity(struct store *store, const struct source *source, unsigned mirror,
		   char **identity);
/* Returns how many units of a source without digests are pinned, or a negative errno. */
int64_t store_pin_count(struct store *store, const struct source *source);

/*
 * Gets the window of a point of the source's index: `*bytes` is 0 where it needs none. Returns 0, or
 * a negative errno.
 */
int store_window(struct store *store, const struct source *source, uint64_t point, uint8_t *window,
		 uint32_t *bytes);
/*
 * Makes the parts of a unit of a source with a selection, as selection_parts() does. Returns 0, or a
 * negative errno.
 */
struct codec_part;
int store_selected(struct store *store, const struct source *source, uint64_t unit, uint32_t gap,
		   uint8_t *data, struct codec_part *parts);
/*
 * Parses the JSON description of a source of a map, without its digests and its index. Returns 0,
 * -EINVAL with the error filled in, or -ENOMEM.
 */
int store_parse_source(const json_t *text, struct source **source, struct error *error);

/*
 * Check whether SQLite finds the file intact, and whether the digests of a source still match its
 * root. Both take long, and return 0, -EUCLEAN or another negative errno.
 */
int store_check(struct store *store, struct error *error);
int store_check_digests(struct store *store, const struct source *source);
/* The same for its index, and its selection. */
int store_check_index(struct store *store, const struct source *source);
