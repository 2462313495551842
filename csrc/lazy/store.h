/* SPDX-License-Identifier: MIT */
/*
 * The map file: sources, mappings, digests and pins of one address space, durable (SQLite). Opened
 * exclusively: one server at a time. All calls but store_digest_at_hand() and store_path() may wait for
 * the disk, or for a call that does, so none of them is made on a worker's or the fetcher's thread; each
 * is safe on any other thread (mutexes).
 */
#ifndef LAZY_STORE_H
#define LAZY_STORE_H

#include <jansson.h>
#include <stdint.h>

#include "lazy/complaint.h"
#include "lazy/map.h"
#include "lazy/source.h"

struct store;

/*
 * Open the map file at `path`, make it where there is none, and load it: `map` gets its mappings.
 * Returns 0 or a negative errno with the complaint filled in: -EBUSY (another server has it),
 * -EPROTONOSUPPORT (of a newer version), -EUCLEAN (no map file, or damaged).
 */
int store_open(const char *path, struct map *map, struct store **store,
	       struct complaint *complaint);
void store_close(struct store *store);

/* One mapping that is to be added. */
struct store_addition {
	/* Inputs. */
	uint64_t offset; /* STORE_ANYWHERE: the lowest free place (store_room) */
	uint64_t length; /* STORE_REST: what the source has from source_offset on */
	uint64_t source_offset;
	unsigned source; /* index in the request's sources */
	/* Outputs. */
	bool existed; /* the same mapping was there already */
};

#define STORE_ANYWHERE UINT64_MAX
#define STORE_REST UINT64_MAX

struct store_room {
	uint64_t start, end; /* where STORE_ANYWHERE may be; bytes, in the virtual data */
	uint64_t alignment;
};

/*
 * Add all or none: synced and in the map when this returns 0. `sources` is an array of JSON
 * descriptions, `offset` and `length` of the additions are filled in. Returns -EEXIST (the complaint names the mapping
 * in the way), -EINVAL, -ENOSPC, -EIO, ... and -ECANCELED when another thread sets `*over` (NULL: none
 * will) while sizes are asked for, source by source.
 */
int store_add(struct store *store, const json_t *sources, struct store_addition *additions,
	      size_t count, const struct store_room *room, const bool *over,
	      struct complaint *complaint);

/*
 * The digest that unit `unit` must have: 1, and it is in `digest`; 0, nothing is known; or a negative
 * errno. For sources with digests, never 0.
 */
int store_digest(struct store *store, const struct source *source, uint64_t unit,
		 uint8_t digest[static SOURCE_DIGEST_BYTES]);

/*
 * The same for any thread, since it never waits: false when it is not in memory, or none came with the
 * source. store_digest() loads those around the one that it is asked for.
 */
bool store_digest_at_hand(struct store *store, const struct source *source, uint64_t unit,
			  uint8_t digest[static SOURCE_DIGEST_BYTES]);

/*
 * Pin the digest of a unit of a source without digests; synced on return (callers at the same time
 * share one sync). Returns 0, or -ESTALE when another digest is pinned already.
 */
int store_pin_digest(struct store *store, const struct source *source, uint64_t unit,
		     const uint8_t digest[static SOURCE_DIGEST_BYTES]);
/* The same for a mirror's identity. */
int store_pin_identity(struct store *store, const struct mirror *mirror, const char *identity);

/* The JSON description of a source, as it was added, without digests; a new reference, or NULL. */
json_t *store_source_json(struct store *store, const struct source *source);

/* As the file is called now: absolute, its directory without symbolic links. */
const char *store_path(const struct store *store);
/* Sources are numbered from 1; NULL: there is none of that number. They stay. */
struct source *store_source(struct store *store, uint64_t id);
uint64_t store_source_count(struct store *store);
/*
 * What a mirror is known by, as it is pinned: 1, and `*identity` is to be freed by the caller; 0: it is
 * not; or a negative errno.
 */
int store_identity(struct store *store, const struct source *source, unsigned mirror,
		   char **identity);
/* How many units of a source without digests are pinned, or a negative errno. */
int64_t store_pin_count(struct store *store, const struct source *source);

/*
 * Whether the file is whole, as far as SQLite can tell, and whether the digests of a source still
 * have its root. Each takes its time, and returns 0, -EUCLEAN or another negative errno.
 */
int store_check(struct store *store, struct complaint *complaint);
int store_check_digests(struct store *store, const struct source *source);

#endif
