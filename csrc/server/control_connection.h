/* SPDX-License-Identifier: MIT */
/* One connected control socket: JSON lines in both directions; the protocol is in the README. */
#ifndef SERVER_CONTROL_CONNECTION_H
#define SERVER_CONTROL_CONNECTION_H

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>

#include "server/engine.h"

enum {
	CONTROL_PROTOCOL = 1,
	CONTROL_LINE_BYTES = 4096, /* longest request */
};

struct control_connection {
	int fd; /* -1: none */
	const struct engine *engine;
	size_t used;
	bool skipping; /* the rest of a line that was too long */
	char line[CONTROL_LINE_BYTES];
};

enum control_action {
	CONTROL_GO_ON,
	CONTROL_STOP, /* asked for */
	CONTROL_GONE, /* the peer has closed its end, or died */
};

/* Bounds how long a peer that does not read can hold us up. Returns 0 or a negative errno. */
int control_init(struct control_connection *connection, int fd, const struct engine *engine);

/* Takes a reference away from `message`, like all json_*_new(). Errors mean that the peer is gone. */
int control_send(struct control_connection *connection, json_t *message);

/* To be called when the descriptor is readable. */
enum control_action control_receive(struct control_connection *connection);

#endif
