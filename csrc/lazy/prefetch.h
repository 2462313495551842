/* SPDX-License-Identifier: MIT */
/*
 * A prefetch that a client asked for: many units, in an order, into the cache, at a limited rate. A
 * fetcher runs one at a time. Readers come first: while some are waiting, the prefetch begins
 * little.
 */
#pragma once

#include <jansson.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

#include "content/cache.h"
#include "lazy/core.h"

enum {
	PREFETCH_EXTENTS_MAX = 1 << 18,
	PREFETCH_AT_ONCE_DEFAULT = 32,
	PREFETCH_AT_ONCE_MAX = 64,
	PREFETCH_LEASE_S = 10,
};

struct prefetch_extent {
	struct source *source; /* not computed */
	uint64_t first, count; /* units */
};

struct prefetch_plan {
	struct prefetch_extent *extents; /* malloc()ed */
	size_t count;
	uint64_t bytes_per_s; /* 0: no limit */
	unsigned at_once;     /* units; half of them are asked for together */
	struct cache_room room;
	bool followed; /* it ends unless prefetch_follow() is called every PREFETCH_LEASE_S */
	/* Not 0: it begins nothing before no read has waited for so long. */
	uint64_t quiet_ns;
	bool keeps_pace; /* the rate counts what the one before it has fetched */
};

enum prefetch_state {
	PREFETCH_NONE,
	PREFETCH_RUNNING,
	PREFETCH_DONE,
	PREFETCH_CANCELLED,
	PREFETCH_FAILED, /* run->why says why */
};

/* A unit that a prefetch waits for. */
struct prefetch_unit {
	struct subscription subscription;
	struct prefetch *prefetch;
};

/* The last prefetch of a fetcher. */
struct prefetch {
	struct core *core;
	pthread_mutex_t start_lock;
	enum prefetch_state state; /* atomic */
	uint64_t id;		   /* atomic; id of the last prefetch, from 1 */
	uint64_t cancel_id;	   /* atomic: id of the prefetch that shall end */
	uint64_t lease_ns; /* atomic: when it ends unless it is followed; UINT64_MAX: never */
	const char *why;

	/* While it runs, only for the fetcher's thread. */
	struct prefetch_plan plan;
	size_t extent; /* index of the current extent */
	uint64_t in_extent;
	unsigned under_way;
	struct prefetch_unit wanted[PREFETCH_AT_ONCE_MAX];
	unsigned uncached_in_a_row;
	uint64_t next_ns; /* when the rate allows the next unit */
	uint64_t quiet_at_ns, reads_seen;
	struct timer timer;
	struct completion news;	 /* it can go on */
	struct completion *over; /* NULL, or news for who has started it: it has ended */

	/* Counters of the last prefetch; see base/relaxed.h. */
	uint64_t units, cached_units, fetched_units, failed_units, uncached_units, fetched_bytes;
	uint64_t bytes_per_s, started_ns, ended_ns, holds_bytes;
	uint64_t waits; /* whether it waits for readers */
};

void prefetch_init(struct prefetch *prefetch, struct core *core);
void prefetch_deinit(struct prefetch *prefetch);
/* Ends the one that runs, on the fetcher's thread. */
void prefetch_abandon(struct prefetch *prefetch);
/*
 * Any thread may call what follows. prefetch_start() returns 0, takes plan->extents and sets `*id`,
 * or returns a negative errno: -EBUSY when another one is running.
 */
int prefetch_start(struct prefetch *prefetch, const struct prefetch_plan *plan, uint64_t *id);
/* Drops what has not begun. Does nothing when that prefetch is over. */
void prefetch_cancel(struct prefetch *prefetch, uint64_t id);
/* Says that a client still waits for the prefetch. */
void prefetch_follow(struct prefetch *prefetch, uint64_t id);
/* Whether that prefetch is running; `id` 0: any. */
bool prefetch_is_running(const struct prefetch *prefetch, uint64_t id);
/* Describes the last prefetch; JSON null when there was none. */
json_t *prefetch_json(const struct prefetch *prefetch);
