/* SPDX-License-Identifier: MIT */
/*
 * A connected control socket: JSON lines in both directions (docs/design/protocol.md). Each request
 * is answered before the next one is read.
 */
#pragma once

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "server/control_request.h"

enum {
	CONTROL_LINE_BYTES = 1 << 20, /* longest request if there is a pool that can parse it */
	CONTROL_SHORT_BYTES = 4096,   /* longest request that is parsed on the main thread */
	CONTROL_FIRST_BYTES = 512,    /* that, doubled some times, is each of these */
	/* How long a peer that does not read its answers may hold us up. */
	CONTROL_OWNER_WAIT_MS = 5000,
	CONTROL_CLIENT_WAIT_MS = 1000,
};

struct control_pool;
struct control_job;

struct control_connection {
	int fd;			   /* -1: none */
	struct control_pool *pool; /* NULL: there are no requests that take long */
	int wait_ms;		   /* for a peer that does not read */

	/* Internal. */
	char *line; /* NULL: nothing has come after the last whole line; or `first`; or longer */
	char first[CONTROL_FIRST_BYTES]; /* of each line; what can be read where memory is short */
	size_t used, room;
	bool skipping;		 /* skipping the rest of a line that was too long */
	bool broken;		 /* a message could not be sent completely */
	int wait_left_ms;	 /* left of wait_ms for the current answers */
	int passed_fd;		 /* came with what is in `line`, or -1 */
	struct control_job *job; /* in progress, or NULL */
	/* How many requests may come now (may be negative), and when that was computed. */
	int64_t allowance;
	uint64_t allowed_ms;
};

/* A peer that does not read may hold us up for `wait_ms`. Returns 0 or a negative errno. */
int control_init(struct control_connection *connection, int fd, struct control_pool *pool,
		 int wait_ms);
/* Closes the connection. A job in progress is finished, and its answer dropped. */
void control_deinit(struct control_connection *connection);

/*
 * Sends `message` and drops a reference to it, like all json_*_new(). An error sets `broken`, but for
 * -ENOMEM: the peer was told that there is no message.
 */
int control_send(struct control_connection *connection, json_t *message);

/*
 * Returns the events to poll(2) for. Lowers `*wait_ms` (-1: no limit) when it has to be called
 * again before.
 */
short control_events(struct control_connection *connection, int *wait_ms);
/* To be called when poll(2) has found something: reads requests, and answers them. */
enum control_action control_receive(struct control_connection *connection,
				    const struct control_subject *subject);
/*
 * To be called when connection->job is done: sends its answer, frees it, and handles the requests
 * that came meanwhile.
 */
enum control_action control_finish(struct control_connection *connection,
				   const struct control_subject *subject);
