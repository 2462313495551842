/* SPDX-License-Identifier: MIT */
/* From the ready event to the stopped one: who may end a server, and when it ends. */
#ifndef SERVER_LIFETIME_H
#define SERVER_LIFETIME_H

#include "server/control_connection.h"
#include "server/control_server.h"

struct frontend;

struct lifetime {
	/* Set by the caller. */
	struct frontend *frontend;
	struct control_connection owner;
	struct control_server clients;
	int signal_fd;

	/* Its own. */
	struct control_subject subject;
	struct control_hands *hands; /* NULL: no request takes its time */
	int signals;
	bool owner_gone;
	bool warned;
};

/*
 * Blocks the signals that end a server, and returns a descriptor that tells of them, or a negative
 * errno. To be called before any thread exists. With an owner, INT and HUP are left to it.
 */
int lifetime_open_signals(bool owned);

/*
 * For requests that take their time, if there are such. Before the sandbox, whose view they must not
 * have. Returns 0 or a negative errno.
 */
int lifetime_start_hands(struct lifetime *lifetime);
/* Before what they work on is closed; -ETIMEDOUT: that must not be done, they are still at it. */
int lifetime_stop_hands(struct lifetime *lifetime);

/* Says that reads are answered. Returns 0 or a negative errno. */
int lifetime_announce(struct lifetime *lifetime);

/*
 * Returns CONTROL_STOP or CONTROL_HAND_OVER when it is time, or a negative errno when the front end
 * failed. An owner that died, or a signal, does not pull the device from under a file system.
 */
int lifetime_wait(struct lifetime *lifetime);

/* The last words. */
void lifetime_end(struct lifetime *lifetime, bool handed_over);

#endif
