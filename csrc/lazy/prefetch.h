/* SPDX-License-Identifier: MIT */
/*
 * A prefetch that was asked for: many units, in an order, into the cache, at a rate. One at a time of
 * a fetcher. Readers come first: while some wait, little is begun for it.
 */
#ifndef LAZY_PREFETCH_H
#define LAZY_PREFETCH_H

#include <jansson.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

#include "lazy/agenda.h"

struct fetcher;
struct source;
struct unit;

enum {
	PREFETCH_EXTENTS_MAX = 1 << 18,
	PREFETCH_AT_ONCE_DEFAULT = 16,
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
	unsigned at_once;     /* units */
	bool followed;	      /* ends when prefetch_follow() was not called for PREFETCH_LEASE_S */
};

enum prefetch_state {
	PREFETCH_NONE,
	PREFETCH_RUNNING,
	PREFETCH_DONE,
	PREFETCH_CANCELLED,
	PREFETCH_FAILED, /* run->why */
};

/* In the fetcher. */
struct prefetch_run {
	pthread_mutex_t start_lock;
	enum prefetch_state state; /* atomic */
	uint64_t id;		   /* atomic; of the last one, from 1 */
	uint64_t cancel_id;	   /* atomic: this one is to end */
	uint64_t lease_ns;	   /* atomic: so is it when this is over; UINT64_MAX: never */
	const char *why;

	/* The fetcher's thread only, while it runs. */
	struct prefetch_plan plan;
	size_t extent; /* where it is */
	uint64_t in_extent;
	unsigned under_way;
	unsigned uncached_in_a_row;
	uint64_t next_ns; /* when the rate lets the next one go */
	struct alarm alarm;

	/* Numbers of the last one: base/relaxed.h. */
	uint64_t units, cached_units, fetched_units, failed_units, uncached_units, fetched_bytes;
	uint64_t bytes_per_s, started_ns, ended_ns;
};

/* Any thread. Takes plan->extents with 0, and sets `*id`; -EBUSY: another one runs. */
int prefetch_start(struct fetcher *fetcher, const struct prefetch_plan *plan, uint64_t *id);
/* What is not begun is dropped. Of one that is over: nothing happens. */
void prefetch_cancel(struct fetcher *fetcher, uint64_t id);
/* Somebody still waits for it. */
void prefetch_follow(struct fetcher *fetcher, uint64_t id);
bool prefetch_is_running(struct fetcher *fetcher, uint64_t id);
/* The last one; null: there was none. */
json_t *prefetch_json(struct fetcher *fetcher);

/* For the fetcher, on its thread. */

void prefetch_run_init(struct fetcher *fetcher);
void prefetch_run_deinit(struct fetcher *fetcher);
/* `unit`, which it wants, is in the cache, or will not be: as its state says. */
void prefetch_unit_over(struct unit *unit);
/* Whether a unit that has failed, and that nobody waits for, is to be tried again. */
bool prefetch_tries_again(const struct unit *unit);

#endif
