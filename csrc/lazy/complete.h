/* SPDX-License-Identifier: MIT */
/*
 * Background completion: fetches all units that a map names and the cache lacks, in the order of
 * the virtual data, behind everybody else. It does so by prefetches of a few seconds. What the
 * cache has is its only state, so it goes on where another process has ended.
 */
#pragma once

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>

#include "lazy/prefetch.h"

struct map;

/* What a segment wants; all zero: no completion. */
struct complete_options {
	bool wanted;
	uint64_t bytes_per_s; /* 0: without a limit, when no read has waited for a second */
};

enum complete_state {
	COMPLETE_OFF,
	COMPLETE_FETCHING,
	COMPLETE_PAUSED,   /* a prefetch of a client runs */
	COMPLETE_RETRYING, /* units failed; it tries again later */
	COMPLETE_FULL,	   /* the cache has no room for the rest; it looks again later */
	COMPLETE_DONE,	   /* it looks from time to time whether the map names more */
};

struct complete {
	struct core *core;
	const struct prefetch *client; /* prefetches of clients, which come first */
	const struct map *map;
	struct complete_options options;
	struct prefetch run;
	struct completion begin, over; /* it may begin; its prefetch has ended */
	struct timer timer;	       /* when to look again */

	/* Of the worker that looks for units that the cache lacks, else of the fetcher's thread. */
	struct pool_job job;
	bool looking;
	struct prefetch_plan plan; /* what was found */
	uint64_t plan_bytes;	   /* how much room that needs */
	uint64_t next;		   /* virtual data: where to look from */
	bool is_full;		   /* none of it has room in the cache */
	struct source *last;	   /* of the plan */
	struct source *skipped;	   /* none of it could be fetched */
	uint64_t lacking;	   /* what this pass over the map has not got */
	uint64_t mappings;	   /* of the map, when the pass began */
	uint64_t got;		   /* units since the last pause */
	unsigned pause_s, looks;   /* looks: for a longer map, since all is done */
	int err;

	/* See base/relaxed.h. */
	uint64_t state;
	const char *why; /* NULL, or why it does not go on */
	uint64_t units, done_units, bytes, done_bytes, fetched_bytes, failed_units;
};

void complete_init(struct complete *complete, struct core *core, const struct prefetch *client);
void complete_deinit(struct complete *complete);
/* Begins. To be called once; the core has a cache. */
void complete_begin(struct complete *complete, const struct map *map,
		    const struct complete_options *options);
/* Ends what can be ended, on the fetcher's thread. A worker may still be `looking`. */
void complete_abandon(struct complete *complete);
/* Describes it; JSON null when it is not wanted. Any thread may call this. */
json_t *complete_json(const struct complete *complete);
