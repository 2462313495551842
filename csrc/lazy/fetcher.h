/* SPDX-License-Identifier: MIT */
/*
 * The fetcher: one thread with an event loop (libuv) owns all units in flight, their readers,
 * mirrors, retries and deadlines (core.h). A few workers do what blocks.
 */
#pragma once

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>

struct cache;
struct complete;
struct fetcher;
struct lazy_read;
struct prefetch;
struct source;
struct store;

struct fetcher_options {
	unsigned workers;	   /* threads, besides one spare; 0: one per CPU, from 2 to 8 */
	unsigned max_transfers;	   /* most units in flight; 0: 96 */
	uint64_t max_buffer_bytes; /* most memory for units; 0: 24 MiB */
	uint64_t run_bytes;	   /* most bytes of a request; 0: 8 MiB; 1: one unit each */
	unsigned changed_ms;	   /* how long a mirror that has changed is not asked; 0: 60000 */
	/* how long other mirrors are preferred to one that fails; 0: 30000 */
	unsigned unhealthy_ms;
	/*
	 * how long a request may be silent that nobody waits for, or that another place may have
	 * instead; 0: as hosts usually take, and 5000 at most
	 */
	unsigned silent_ms;
	bool spawns; /* kinds of mirrors start btrfs-ublk-fetch; see fetcher_ops.h */
};

/*
 * Starts the threads. To be called before the sandbox is entered, so that they see the host's
 * files. `store` and `cache` may be NULL; without a store, nothing is pinned. Returns 0 or a
 * negative errno.
 */
int fetcher_start(const struct fetcher_options *options, struct store *store, struct cache *cache,
		  struct fetcher **fetcher);
/*
 * Fails all reads with -EIO, and ends the threads. Returns 0, or -ETIMEDOUT when a worker hangs in
 * work that does not end: then nothing that it uses may be freed before the process ends.
 */
int fetcher_stop(struct fetcher *fetcher);

/* Begins a read (read.h). Any thread may call this; it never waits. */
void fetcher_read(struct fetcher *fetcher, struct lazy_read *read);
/*
 * Fails all reads, and all that come later, with -EIO, because the device is going away. Any thread
 * may call this.
 */
void fetcher_abandon(struct fetcher *fetcher);
/*
 * Fetches the units of [offset, offset + length) into the cache when there is nothing else to do.
 * Any thread may call this; nothing happens when memory is short.
 */
void fetcher_read_ahead(struct fetcher *fetcher, struct source *source, uint64_t offset,
			uint64_t length);
/* Its prefetch (prefetch.h). Any thread may call this. */
struct prefetch *fetcher_prefetch(struct fetcher *fetcher);
/* Its background completion (complete.h). Any thread may call this. */
struct complete *fetcher_complete(struct fetcher *fetcher);

/*
 * Returns counters as a new reference: fetched, verified, failed, in flight, by mirror and by host.
 * Any thread may call this.
 */
json_t *fetcher_stats_json(struct fetcher *fetcher);
