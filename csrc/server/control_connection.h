/* SPDX-License-Identifier: MIT */
/* One connected control socket: JSON lines in both directions; the protocol is in the README. */
#ifndef SERVER_CONTROL_CONNECTION_H
#define SERVER_CONTROL_CONNECTION_H

#include <jansson.h>
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
	char line[CONTROL_LINE_BYTES];
};

enum control_action {
	CONTROL_GO_ON,
	CONTROL_STOP, /* asked for, or the peer has gone */
};

/* Takes a reference away from `message`, like all json_*_new(). Errors mean that the peer is gone. */
int control_send(struct control_connection *connection, json_t *message);

/* To be called when the descriptor is readable. */
enum control_action control_receive(struct control_connection *connection);

#endif
