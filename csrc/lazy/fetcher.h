/* SPDX-License-Identifier: MIT */
/*
 * The fetcher: one thread with an event loop (libuv) that has all units in flight, who waits for
 * them, their mirrors, retries and deadlines; and a few hands for what blocks.
 */
#ifndef LAZY_FETCHER_H
#define LAZY_FETCHER_H

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/list.h"
#include "base/mailbox.h"
#include "lazy/agenda.h"
#include "lazy/source.h"

struct cache;
struct fetcher;
struct store;
struct uv_loop_s;

#define FETCHER_NO_DEADLINE UINT64_MAX

/* What is given to the fetcher's thread. */
struct post {
	struct mail mail;
	void (*arrive)(struct fetcher *fetcher, struct post *post);
};

/* A read that was not answered from the cache. Lives with whoever asks, until done() is called. */
struct lazy_read {
	/* Set by the caller. */
	struct source *source; /* not computed */
	uint64_t offset;       /* bytes, in the source; ends within its last block of 4 KiB */
	uint32_t length;       /* bytes */
	uint8_t *data;
	uint64_t deadline_ns; /* CLOCK_MONOTONIC */
	/* Called once, on any thread: 0, and `data` is filled and verified, or a negative errno. */
	void (*done)(struct lazy_read *read, int result);

	/* The fetcher's own. */
	struct post post;
	struct fetcher *fetcher;
	struct alarm deadline;
	struct link link;
	struct waiter *waiters;
	unsigned units_left;
};

struct fetcher_options {
	unsigned hands;		   /* threads, besides a spare one; 0: as many as CPUs, 8 at most */
	unsigned max_transfers;	   /* units in flight; 0: 96 */
	uint64_t max_buffer_bytes; /* of units in memory; 0: 24 MiB */
	unsigned changed_ms;	   /* until a mirror that has changed is asked again; 0: 60000 */
	unsigned unhealthy_ms;	   /* for which others come before one that fails; 0: 30000 */
};

/*
 * Starts the threads; before the sandbox, whose view they must not have. `store` (nothing is pinned
 * then) and `cache` may be NULL. Returns 0 or a negative errno.
 */
int fetcher_start(const struct fetcher_options *options, struct store *store, struct cache *cache,
		  struct fetcher **fetcher);
/*
 * Fails what is waited for with -EIO, and ends the threads. Returns 0, or -ETIMEDOUT: a hand hangs in
 * work that does not end, so that nothing that it uses may be freed before the process ends.
 */
int fetcher_stop(struct fetcher *fetcher);

/* Any thread; never waits. */
void fetcher_read(struct fetcher *fetcher, struct lazy_read *read);
/*
 * From now on, all that is waited for, and what comes later, fails with -EIO: the device is to go.
 * Any thread.
 */
void fetcher_abandon(struct fetcher *fetcher);
/*
 * Have the units of [offset, offset + length) fetched and cached when there is nothing else to do.
 * Any thread; without memory, nothing happens.
 */
void fetcher_prefetch(struct fetcher *fetcher, struct source *source, uint64_t offset,
		      uint64_t length);

/* For kinds of mirrors, on the fetcher's thread: the loop that their transfers run on. */
struct uv_loop_s *fetcher_loop(struct fetcher *fetcher);

/* What kinds of mirrors keep for all mirrors of a fetcher; on its thread. */
struct fetcher_attachment {
	const void *key; /* any address, by which it is found */
	/*
	 * No fetch is running any more: close all handles in the loop, which is run until they are
	 * closed, and free what there is.
	 */
	void (*close)(struct fetcher_attachment *attachment);
	struct fetcher_attachment *next; /* the fetcher's own */
};
void fetcher_attach(struct fetcher *fetcher, struct fetcher_attachment *attachment);
/* NULL: nothing was attached. */
struct fetcher_attachment *fetcher_attached(const struct fetcher *fetcher, const void *key);

/* Work that blocks: `work` on a hand, then `done` on the fetcher's thread. Embedded in what it is of. */
struct hand_job {
	void (*work)(struct hand_job *job);
	void (*done)(struct hand_job *job);
	/* What it may hang on, as a number; only some of the hands work on one place. 0: none */
	uint64_t place;
	struct post post; /* the fetcher's own */
};
/*
 * For kinds of mirrors: on hands that do nothing else, so that verifying goes on when they hang. The
 * fetcher's thread.
 */
void fetcher_hand(struct fetcher *fetcher, struct hand_job *job);
/* The same thread: false, it has begun; else it is the caller's again. */
bool fetcher_hand_back(struct fetcher *fetcher, struct hand_job *job);

/* Counters: fetched, verified, failed, by mirror and host; in flight. A new reference. Any thread. */
json_t *fetcher_stats_json(struct fetcher *fetcher);

#endif
