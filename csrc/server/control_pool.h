/* SPDX-License-Identifier: MIT */
/*
 * Threads for requests that take long. The first one is started before the sandbox is entered, and
 * each starts the next (base/worker_pool.h), so that all of them see the host's files.
 */
#pragma once

#include <stdbool.h>

#include "base/list.h"
#include "base/worker_pool.h"
#include "server/control_request.h"

struct control_pool;

/* A request. The receiver makes it. */
struct control_job {
	/*
	 * A line that is too long for the main thread to parse; or NULL, and call.message is set.
	 */
	char *line;
	size_t length;
	struct control_call call;
	const struct control_kind *kind;

	/*
	 * The result: an answer; or, if that is NULL and `kind` has no `work`, a message for the
	 * main thread to answer.
	 */
	json_t *reply;

	/* The pool's own. */
	struct pool_job job;
	struct link link;
};

/* Starts the first thread. Returns 0 or a negative errno. */
int control_pool_start(struct control_pool **pool);
/*
 * Tells all jobs that their clients have gone, and waits for some seconds. Returns 0, or -ETIMEDOUT
 * when some still run, so that nothing that they use may be freed. `pool` may be NULL.
 */
int control_pool_stop(struct control_pool *pool);

/* A descriptor that is readable when jobs are done. */
int control_pool_fd(const struct control_pool *pool);
/* Returns false when there are too many jobs; the caller keeps `job`. */
bool control_pool_submit(struct control_pool *pool, struct control_job *job);
/* Returns a finished job, which the caller owns again, or NULL. */
struct control_job *control_pool_take(struct control_pool *pool);

void control_job_free(struct control_job *job);
