/* SPDX-License-Identifier: MIT */
/*
 * What kinds of mirrors have of a fetcher: its loop, and what it does for them. The server has one
 * (fetcher.c), as have the fetch process and tests. Only for the fetcher's thread, where nothing
 * else is said.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "base/worker_pool.h"

struct attachment;
struct fetcher;
struct inquiry;
struct uv_loop_s;

struct fetcher_ops {
	/*
	 * Gives a mirror's job to workers that do nothing else, so that units are still verified
	 * when they hang.
	 */
	void (*submit)(struct fetcher *fetcher, struct pool_job *job);
	/* Takes such a job back. Returns false when it has begun already. */
	bool (*cancel)(struct fetcher *fetcher, struct pool_job *job);
	/*
	 * Gives a job to the thread that may start processes of other users, and end them. They end
	 * when it does. NULL: no kind starts any.
	 */
	void (*spawn)(struct fetcher *fetcher, struct pool_job *job);
	/*
	 * Has a mirror asked (inquiry.h), and waits for the outcome. On any thread but the
	 * fetcher's; not while it is stopped. inquiry->done is the fetcher's own. NULL: nobody asks.
	 */
	void (*inquire)(struct fetcher *fetcher, struct inquiry *inquiry);
	/*
	 * Takes what belongs to the fetcher's thread, which it leaves before each wait. What the loop
	 * calls for a descriptor calls fetcher_enter() first. NULL: no other thread ever has it.
	 */
	void (*enter)(struct fetcher *fetcher);
};

/* Of fetch processes. See base/relaxed.h. */
struct process_counts {
	uint64_t started, died; /* `died`: also those that had to be killed, but not idle ones */
	uint64_t failed;	/* could not be started */
	uint64_t running;
	uint64_t lacks; /* of the newest; see base/confine_process.h */
};

struct fetcher {
	/* Set by the maker, zeroed otherwise. */
	const struct fetcher_ops *ops;
	struct uv_loop_s *loop; /* that transfers run on; its `data` are the fetcher, or NULL */

	/*
	 * A reader's thread has what belongs to the fetcher's. It leaves the loop's handles alone, and
	 * sets `wanted` where the fetcher's thread has to go on. Both are 0 otherwise.
	 */
	bool visited, wanted;

	bool ending;			/* nothing is begun that no run or inquiry waits for */
	unsigned logins;		/* that are being made: what they need must stay */
	struct attachment *attachments; /* see attachment.h */
	struct process_counts processes;
};

static inline void fetcher_enter(struct fetcher *fetcher)
{
	if (fetcher->ops->enter)
		fetcher->ops->enter(fetcher);
}
