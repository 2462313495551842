/* SPDX-License-Identifier: MIT */
/*
 * The local cache. Each content (source->key) has one sparse file, in which a unit lies at the same
 * offset as in the source, and one file of bits that say which units are there. Several servers
 * share a directory; docs/materialisation.md says why that is safe.
 *
 * The last unit of a source is padded with zeroes to the next multiple of 4 KiB.
 */
#pragma once

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/error.h"
#include "base/size.h"
#include "content/source.h"

struct cache;
struct cache_object;

/*
 * Where both are 0, the directory's own file `limits` applies, or else no limit and a reserve of a
 * twentieth.
 */
struct cache_options {
	uint64_t max_bytes;	/* of all contents; 0: no limit */
	uint64_t reserve_bytes; /* to be left free on the file system; 0: a twentieth of its size */
};

/*
 * Opens the directory, and makes it (mode 0700) where there is none. It must belong to this user
 * and not be a symbolic link. The caller must see the host's files. While another process has it
 * locked, opening contents waits. Returns 0, or a negative errno with the error filled in.
 */
int cache_open(const char *directory, const struct cache_options *options, struct cache **cache,
	       struct error *error);
/*
 * Syncs what is not durable yet, and closes the cache. If its disk takes seconds for that, the
 * cache is left open, because the process is about to end.
 */
void cache_close(struct cache *cache);

/*
 * Returns the cache's object for a source. It is opened (or made) once and kept in source->cached.
 * Only pool workers may call this, because it may wait for the disk. Returns 0 or a negative errno,
 * in which case the source is served without the cache.
 */
int cache_object_open(struct cache *cache, struct source *source, struct cache_object **object);
/* Returns what cache_object_open() has made, or NULL. Any thread may call this; it never waits. */
struct cache_object *cache_object_of(const struct source *source);

/* The state that a reader of units [first, last] saw before it read. */
struct cache_lookup {
	uint64_t first, last;
	uint64_t evictions;
};

/*
 * Returns whether all of [first, last] can be read now, and counts as a use of these units. Any
 * thread may call this; it never waits.
 */
bool cache_lookup(const struct cache_object *object, uint64_t first, uint64_t last,
		  struct cache_lookup *lookup);
/* Does the same without counting as a use, so that asking does not keep units from eviction. */
bool cache_has(const struct cache_object *object, uint64_t first, uint64_t last);
/* The same for a unit of a source, whose content may not be open. */
bool cache_has_unit(const struct source *source, uint64_t unit);
/* The descriptor to read from, at the same offsets as in the source. */
int cache_fd(const struct cache_object *object);
/* Whether the file is on tmpfs or ramfs, where plain system calls read best (docs/features.md). */
bool cache_is_in_memory(const struct cache_object *object);
/* To be called after the read. If it returns false, the bytes that were read may be anything. */
bool cache_lookup_is_valid(const struct cache_object *object, const struct cache_lookup *lookup);
/*
 * To be called after that: returns whether the bytes match the checksums of their blocks. If they
 * do not, fetch the unit; who fetches it drops it from the cache. `offset` is a multiple of 4
 * KiB; so is `length`, except at the end of the source.
 */
bool cache_verify(const struct cache_object *object, uint64_t offset, const uint8_t *data,
		  uint32_t length);

/*
 * Puts a verified unit in. Only pool workers may call this. The unit can be looked up when this
 * returns, and is durable a moment later (units share a sync). Returns 0; -ENOSPC when there is no
 * space and nothing to evict; or another negative errno. An error means that the unit is not
 * cached, and is no failure of the read.
 */
int cache_put(struct cache_object *object, uint64_t unit, const uint8_t *data, uint32_t length);
/* Removes a unit whose bytes turned out to be wrong. */
int cache_drop(struct cache_object *object, uint64_t unit);

/* Units [first, end) of a content that are about to be fetched. */
struct cache_range {
	struct cache_object *object;
	uint64_t first, end;
};
/* Must be zeroed at first. Ranges may come in any order, and overlap. */
struct cache_ranges {
	struct cache_range *list;
	size_t count, room;
};
int cache_ranges_add(struct cache_ranges *ranges, struct cache_object *object, uint64_t first,
		     uint64_t end);
void cache_ranges_free(struct cache_ranges *ranges);

struct cache_room {
	/* how many bytes of the ranges are missing and fit: they can be put, and stay */
	uint64_t bytes;
	uint64_t holds_bytes; /* how many bytes the limits leave for all that is not pinned */
};
/*
 * Evicts units to make room for the ranges, as far as the limits require, but never units in the
 * ranges; without `evict`, finds the room that is there. Only pool workers may call this. Returns 0
 * or a negative errno.
 */
int cache_room_for(struct cache *cache, struct cache_ranges *ranges, bool evict,
		   struct cache_room *room);
/* How much of the room a unit of `length` bytes takes. */
static inline uint64_t cache_room_of(uint32_t length)
{
	return round_up_u64(length, BLOCK_BYTES);
}

/* Waits until all that was put before this call is durable. Only pool workers may call this. */
void cache_sync(struct cache *cache);

/* Returns counters of this process, and the state of the directory, as a new reference. */
json_t *cache_stats_json(struct cache *cache);
