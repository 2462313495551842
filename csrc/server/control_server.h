/* SPDX-License-Identifier: MIT */
/*
 * The control socket that any process of the same user may connect to. Unlike the owner, its
 * clients may leave at any time, and none of them can hold up the others, whatever it does.
 */
#pragma once

#include <poll.h>
#include <stdint.h>

#include "server/control_connection.h"

enum {
	CONTROL_CLIENTS = 16,
	CONTROL_POLL_FDS = 1 + CONTROL_CLIENTS,
};

struct control_client {
	struct control_connection connection;
	uint64_t last_ms; /* when it last sent something, CLOCK_MONOTONIC */
};

struct control_server {
	int fd; /* listening; -1: none */
	struct control_pool *pool;
	uint64_t accept_again_ms; /* no accept(2) before that time; 0: at once */
	struct control_client clients[CONTROL_CLIENTS];
};

/*
 * `fd` is a listening Unix stream socket, or -1. Returns 0 or a negative errno. The caller sets
 * `pool` later.
 */
int control_server_init(struct control_server *server, int fd);
void control_server_deinit(struct control_server *server);

/* Prepares `fds` for poll(2). Returns the time limit in milliseconds, or -1 for none. */
int control_server_prepare(struct control_server *server,
			   struct pollfd fds[static CONTROL_POLL_FDS]);

/*
 * Sends the answer of a finished job to its client. Returns CONTROL_GONE when that has left; the
 * caller keeps the job.
 */
enum control_action control_server_finish(struct control_server *server,
					  const struct control_subject *subject,
					  const struct control_job *job);

/* Handles what poll(2) has found. Returns CONTROL_GO_ON, _STOP or _HAND_OVER. */
enum control_action control_server_serve(struct control_server *server,
					 const struct control_subject *subject,
					 const struct pollfd fds[static CONTROL_POLL_FDS]);
