/* SPDX-License-Identifier: MIT */
/*
 * The control socket that anybody of the same user may connect to. Its clients are no owners:
 * nothing happens when they leave, and none of them, slow, silent or mad, holds up the others.
 */
#ifndef SERVER_CONTROL_SERVER_H
#define SERVER_CONTROL_SERVER_H

#include <poll.h>
#include <stdint.h>

#include "server/control_connection.h"

enum {
	CONTROL_CLIENTS = 16,
	CONTROL_POLL_FDS = 1 + CONTROL_CLIENTS,
};

struct control_client {
	struct control_connection connection;
	uint64_t last_ms; /* when it was heard last, CLOCK_MONOTONIC */
};

struct control_server {
	int fd; /* listening; -1: none */
	struct control_hands *hands;
	uint64_t accept_again_ms; /* not before that time; 0: at once */
	struct control_client clients[CONTROL_CLIENTS];
};

/* `fd` is a listening Unix stream socket, or -1. Returns 0 or a negative errno. `hands` is set later. */
int control_server_init(struct control_server *server, int fd);
void control_server_deinit(struct control_server *server);

/* What poll(2) is to wait for. Returns for how long at most, in milliseconds; -1: for ever. */
int control_server_prepare(struct control_server *server,
			   struct pollfd fds[static CONTROL_POLL_FDS]);

/*
 * The client whose job this is, which is done, gets its answer. CONTROL_GONE: none is there any more,
 * and the job is still the caller's.
 */
enum control_action control_server_finish(struct control_server *server,
					  const struct control_subject *subject,
					  const struct control_job *job);

/* Serves what poll(2) found. Returns CONTROL_GO_ON, _STOP or _HAND_OVER. */
enum control_action control_server_serve(struct control_server *server,
					 const struct control_subject *subject,
					 const struct pollfd fds[static CONTROL_POLL_FDS]);

#endif
