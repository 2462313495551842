/* SPDX-License-Identifier: MIT */
/*
 * Threads for requests that take their time. They are started before the sandbox and beget each
 * other, so that all of them see files as the host does: one of them always waits for work, and
 * makes another one before it begins.
 */
#ifndef SERVER_CONTROL_HANDS_H
#define SERVER_CONTROL_HANDS_H

#include <pthread.h>
#include <stdbool.h>

#include "server/control_request.h"

struct control_hands;

/* One request; made by who has received it. */
struct control_job {
	/* A line that was too long to be parsed by who waits for all, or NULL: call.message is set. */
	char *line;
	size_t length;
	struct control_call call;
	const struct control_kind *kind;

	/*
	 * What came of it: an answer, or, where that is NULL and `kind` has none of its own, a
	 * message to be answered as if it had been short.
	 */
	json_t *reply;
	struct control_job *next;
};

/* Starts the first thread. Returns 0 or a negative errno. */
int control_hands_start(struct control_hands **hands);
/*
 * Tells all that their work is over, and waits for a while. Returns 0, or -ETIMEDOUT: some are still
 * at it, so nothing that they use may be freed. NULL: nothing happens.
 */
int control_hands_stop(struct control_hands *hands);

/* Readable when jobs are done. */
int control_hands_fd(const struct control_hands *hands);
/* Returns false when there is too much to do already: `job` is still the caller's. */
bool control_hands_give(struct control_hands *hands, struct control_job *job);
/* One that is done, or NULL. It is the caller's again. */
struct control_job *control_hands_take(struct control_hands *hands);

void control_job_free(struct control_job *job);

#endif
