/* SPDX-License-Identifier: MIT */
/*
 * One connected control socket: JSON lines in both directions (docs/design/protocol.md). A
 * request is answered before the next one is looked at.
 */
#ifndef SERVER_CONTROL_CONNECTION_H
#define SERVER_CONTROL_CONNECTION_H

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "server/control_request.h"

enum {
	CONTROL_LINE_BYTES = 1 << 20, /* longest request, where there are hands to parse it */
	CONTROL_SHORT_BYTES = 4096,   /* longest that is parsed on the spot */
	/* How long a peer may hold us up that does not read its answers. */
	CONTROL_OWNER_WAIT_MS = 5000,
	CONTROL_CLIENT_WAIT_MS = 1000,
};

struct control_hands;
struct control_job;

struct control_connection {
	int fd;			     /* -1: none */
	struct control_hands *hands; /* NULL: no request takes its time */
	int wait_ms;		     /* for a peer that does not read */

	/* Its own. */
	char *line; /* NULL: nothing has come since the last whole line */
	size_t used, room;
	bool skipping;		 /* the rest of a line that was too long */
	bool broken;		 /* a message could not be sent, or not as a whole */
	int wait_left_ms;	 /* for the answers to what has come together */
	int passed_fd;		 /* that came with what is in `line`, or -1 */
	struct control_job *job; /* under way; NULL: none */
	/* Requests that may come now, and since when, so that nobody has us to himself; may be < 0. */
	int64_t allowance;
	uint64_t allowed_ms;
};

/* A peer that does not read can hold us up for `wait_ms`. Returns 0 or a negative errno. */
int control_init(struct control_connection *connection, int fd, struct control_hands *hands,
		 int wait_ms);
/* Closes it. What is under way is finished, and its answer dropped. */
void control_deinit(struct control_connection *connection);

/* Takes a reference away from `message`, like all json_*_new(). An error sets `broken`. */
int control_send(struct control_connection *connection, json_t *message);

/*
 * What poll(2) is to wait for, and for how long at most: `*wait_ms` is lowered where that is to be
 * less (-1: for ever).
 */
short control_events(struct control_connection *connection, int *wait_ms);
/* To be called when poll(2) has found something: takes what is there, and answers it. */
enum control_action control_receive(struct control_connection *connection,
				    const struct control_subject *subject);
/* When connection->job is done: sends its answer, frees it, and goes on with what came meanwhile. */
enum control_action control_finish(struct control_connection *connection,
				   const struct control_subject *subject);

#endif
