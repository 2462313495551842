/* SPDX-License-Identifier: MIT */
/*
 * Administration of a cache, while servers use it. `key` has 64 hexadecimal digits, like the names
 * of its files.
 */
#pragma once

#include "lazy/cache.h"

/*
 * An array of {"key", "size", "unit_bytes", "units", "cached_units", "cached_bytes", "pinned",
 * "in_use", "last_use_s"}, or {"key", "error"} for content that servers would refuse. A new
 * reference.
 */
int cache_admin_list(struct cache *cache, json_t **list);
/* {"key", "size", "unit_bytes", "ranges": [[FIRST, LAST], ...]} of the cached units. */
int cache_admin_units(struct cache *cache, const char *key, json_t **units, struct error *error);
/* {"checked", "rotten": [UNIT, ...]}: cached units whose data have changed. */
int cache_admin_check(struct cache *cache, const char *key, json_t **found, struct error *error);
int cache_admin_drop(struct cache *cache, const char *key, const uint64_t *units, size_t count,
		     struct error *error);
/* Removes all units of a content, and its files when nobody has it open. -EPERM: it is pinned. */
int cache_admin_remove(struct cache *cache, const char *key, uint64_t *bytes, struct error *error);
int cache_admin_pin(struct cache *cache, const char *key, bool pinned, struct error *error);
#define CACHE_KEEP_RESERVE UINT64_MAX
/*
 * Sets the limits of all servers. 0 stands for no cap, or a reserve of a twentieth.
 * CACHE_KEEP_RESERVE leaves the reserve as it is.
 */
int cache_admin_limit(struct cache *cache, uint64_t max_bytes, uint64_t *reserve_bytes,
		      struct error *error);
/* Evicts until at most `bytes` are left. -ENOSPC: pinned contents take more. */
int cache_shrink(struct cache *cache, uint64_t bytes);
