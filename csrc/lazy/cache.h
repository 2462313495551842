/* SPDX-License-Identifier: MIT */
/*
 * The local cache: per content (source->key) one sparse file, in which a unit has the place that it
 * has in the source, and one file of bits: which units are there. Several servers share a directory;
 * docs/materialisation.md says what makes that right.
 *
 * The last unit of a source is followed by zeroes up to the next multiple of 4 KiB.
 */
#ifndef LAZY_CACHE_H
#define LAZY_CACHE_H

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>

#include "lazy/complaint.h"
#include "lazy/source.h"

struct cache;
struct cache_object;

/* Both 0: those that the directory's own file `limits` has, or else: none, and a twentieth. */
struct cache_options {
	uint64_t max_bytes;	/* of all contents; 0: no limit */
	uint64_t reserve_bytes; /* to be left free on the file system; 0: a twentieth of it */
};

/*
 * Opens the directory, and makes it (mode 0700) where there is none. It must be of this user, and no
 * symbolic link. Host's view. Returns 0 or a negative errno with the complaint filled in.
 */
int cache_open(const char *directory, const struct cache_options *options, struct cache **cache,
	       struct complaint *complaint);
/* Makes durable what is not, and closes. */
void cache_close(struct cache *cache);

/*
 * The cache's object for a source, opened (or made) once and kept in source->cached. Hands only: it
 * may wait for the disk. Returns 0 or a negative errno; without it a source is served uncached.
 */
int cache_object_open(struct cache *cache, struct source *source, struct cache_object **object);
/* What cache_object_open() has made; NULL: nothing yet. Any thread, without waiting. */
struct cache_object *cache_object_of(const struct source *source);

/* What a reader of units [first, last] saw before it read. */
struct cache_look {
	uint64_t first, last;
	uint64_t evictions;
};

/* Whether all of [first, last] can be read now. Any thread, without waiting. A use of the units. */
bool cache_look(const struct cache_object *object, uint64_t first, uint64_t last,
		struct cache_look *look);
/* The same for who only asks: that is no use of them, which would keep them from eviction. */
bool cache_has(const struct cache_object *object, uint64_t first, uint64_t last);
/* Where to read them: at the same offsets as in the source. */
int cache_fd(const struct cache_object *object);
/* The file is on tmpfs or ramfs, which system calls read best (docs/features.md). */
bool cache_in_memory(const struct cache_object *object);
/* After the read: whether what was read counts. If not, it may be anything. */
bool cache_still(const struct cache_object *object, const struct cache_look *look);

/*
 * Put a verified unit in. Hands only. It can be looked up when this returns; it is durable a moment
 * later (others' units share the sync). Returns 0; -ENOSPC: there is no room and nothing to evict;
 * or another negative errno: it is not cached, which is no failure of the read.
 */
int cache_put(struct cache_object *object, uint64_t unit, const uint8_t *data, uint32_t length);
/* A unit that turned out not to be what it should be. */
int cache_drop(struct cache_object *object, uint64_t unit);

/* Waits until all that was put before is durable, whatever is put meanwhile. Hands only. */
void cache_sync(struct cache *cache);

/* Counters of this process, and the state of the directory. A new reference. */
json_t *cache_stats_json(struct cache *cache);

#endif
