/* SPDX-License-Identifier: MIT */
/* One connected control socket: JSON lines in both directions; the protocol is in the README. */
#ifndef SERVER_CONTROL_CONNECTION_H
#define SERVER_CONTROL_CONNECTION_H

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>

#include "server/control_request.h"

enum { CONTROL_LINE_BYTES = 4096 /* longest request */ };

struct control_connection {
	int fd; /* -1: none */
	size_t used;
	bool skipping; /* the rest of a line that was too long */
	bool broken;   /* a message could not be sent, or not as a whole */
	char line[CONTROL_LINE_BYTES];
};

/*
 * Bounds how long a peer that does not read can hold us up: by some seconds, or not at all if `fd`
 * is non-blocking. Returns 0 or a negative errno.
 */
int control_init(struct control_connection *connection, int fd);

/* Takes a reference away from `message`, like all json_*_new(). An error sets `broken`. */
int control_send(struct control_connection *connection, json_t *message);

/* To be called when the descriptor is readable: takes what is there, and answers it. */
enum control_action control_receive(struct control_connection *connection,
				    const struct control_subject *subject);

#endif
