/* SPDX-License-Identifier: MIT */
/* A server's life from the ready event to the stopped event: who may end it, and when it ends. */
#pragma once

#include "server/control_connection.h"
#include "server/control_server.h"

struct frontend;

struct lifetime {
	/* Set by the caller. */
	struct frontend *frontend;
	struct control_connection owner;
	struct control_server clients;
	int signal_fd;

	/* Internal. */
	struct control_subject subject;
	struct control_pool *pool; /* NULL: there are no requests that take long */
	int signals;
	bool owner_gone;
	bool warned;
};

/*
 * Blocks the signals that end a server. Returns a descriptor that receives them, or a negative
 * errno. To be called before any thread exists. With an owner, INT and HUP are left to it.
 */
int lifetime_open_signals(bool owned);

/*
 * Starts the pool if there are requests that take long. To be called before the sandbox is entered,
 * so that its threads see the host's files. Returns 0 or a negative errno.
 */
int lifetime_start_pool(struct lifetime *lifetime);
/*
 * To be called before what its jobs use is closed. Returns 0, or -ETIMEDOUT when jobs still run, so
 * that nothing may be closed.
 */
int lifetime_stop_pool(struct lifetime *lifetime);

/* Announces that reads are answered. Returns 0 or a negative errno. */
int lifetime_announce(struct lifetime *lifetime);

/*
 * Returns CONTROL_STOP or CONTROL_HAND_OVER, or a negative errno when the front end has failed. A
 * dead owner, or a signal, does not end a device that a file system uses; a second signal does,
 * but hands it over if it outlives this process.
 */
int lifetime_wait(struct lifetime *lifetime);

/* Announces the end. */
void lifetime_end(struct lifetime *lifetime, bool handed_over);

/* Raises the soft limit of open files to the hard one. */
void lifetime_allow_descriptors(void);
