/* SPDX-License-Identifier: MIT */
/* Looking after a cache, while servers use it. `key`: 64 hexadecimal digits, as its files are named. */
#ifndef CACHE_ADMIN_H
#define CACHE_ADMIN_H

#include "lazy/cache.h"

/*
 * An array of {"key", "size", "unit_bytes", "units", "cached_units", "cached_bytes", "pinned", "in_use",
 * "last_use_s"}, or {"key", "error"} for what no server would believe. A new reference.
 */
int cache_admin_list(struct cache *cache, json_t **list);
/* {"key", "size", "unit_bytes", "ranges": [[FIRST, LAST], ...]} of the units that are there. */
int cache_admin_units(struct cache *cache, const char *key, json_t **units,
		      struct complaint *complaint);
int cache_admin_drop(struct cache *cache, const char *key, const uint64_t *units, size_t count,
		     struct complaint *complaint);
/* All units of a content, and, when nobody has it open, its files. -EPERM: it is pinned. */
int cache_admin_remove(struct cache *cache, const char *key, uint64_t *bytes,
		       struct complaint *complaint);
int cache_admin_pin(struct cache *cache, const char *key, bool pinned, struct complaint *complaint);
#define CACHE_KEEP_RESERVE UINT64_MAX
/*
 * What all servers keep to from now on; 0: no cap, or a reserve of a twentieth.
 * CACHE_KEEP_RESERVE becomes the one that was set before.
 */
int cache_admin_limit(struct cache *cache, uint64_t max_bytes, uint64_t *reserve_bytes,
		      struct complaint *complaint);
/* Evict until at most `bytes` are left, as far as contents are not pinned. -ENOSPC: they are. */
int cache_shrink(struct cache *cache, uint64_t bytes);

#endif
