/* SPDX-License-Identifier: MIT */
/* Administration of a cache, while servers use it. */
#pragma once

#include "content/cache.h"

/*
 * Runs a command. A KEY has 64 hexadecimal digits, like the names of files:
 *
 *   status		{"directory", "bytes", "free_bytes", "contents"}; the contents as
 *			{"key", "size", "unit_bytes", "units", "cached_units", "cached_bytes",
 *			"pinned", "in_use", "last_use_s"}, or {"key", "error"}
 *   units KEY		{"key", "size", "unit_bytes", "ranges": [[FIRST, LAST], ...]}: cached ones
 *   check KEY		{"checked", "rotten": [UNIT, ...]}: units whose sums are not their data's
 *   drop KEY UNIT...	{"dropped"}
 *   shrink BYTES	{"bytes", "evicted_bytes"}
 *   limit MAX RESERVE	{"max_bytes", "reserve_bytes"}, of all servers; MAX 0: no cap; RESERVE 0: a
 *			twentieth, "-": as it is
 *   remove KEY		{"evicted_bytes"}; its files stay where it is open. -EPERM: it is pinned.
 *   pin KEY, unpin KEY	{"pinned"}
 *
 * Returns 0 with a new reference; -EINVAL or -ENOENT for wrong words; or another negative errno.
 */
int cache_admin(const char *directory, char **words, int count, json_t **answer,
		struct error *error);
/* Evicts until at most `bytes` are left. -ENOSPC: pinned contents take more. */
int cache_shrink(struct cache *cache, uint64_t bytes);
