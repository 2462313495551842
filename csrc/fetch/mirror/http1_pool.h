/* SPDX-License-Identifier: MIT */
/* The hosts that are asked by plain HTTP/1.1, and the connections to them, which are kept. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <uv.h>

#include "fetch/attachment.h"
#include "fetch/mirror/carrier.h"
#include "fetch/mirror/http1_head.h"
#include "fetch/mirror/http1_request.h"

/* Each fetcher has one. */
struct http1 {
	struct attachment attachment;
	struct fetcher *fetcher;
	struct timer_queue timers;
	struct link hosts;
	struct link idle; /* connections of all hosts, the one last used last */
	unsigned idle_count;
	char head[HTTP1_HEAD_MAX_BYTES]; /* what has arrived just now */
};

/* Freed when it is looked for and not used any more. */
struct http1_host {
	struct http1 *http1;
	struct link link;
	struct link waiting; /* carriages, while there are too many connections */
	unsigned connections;
	uint64_t refused_until_ns;
	size_t name_length;
	char name[]; /* and port, without NUL */
};

struct http1_connection {
	struct http1_host *host;
	struct carriage *carriage; /* NULL: it is idle */
	struct transfer connecting;
	uv_poll_t poll; /* only when `fd` is open */
	int fd;
	bool used; /* for a request before this one */
	struct link link;
	struct timer timer; /* both while it is idle; or what a reader's thread has left to do */

	char *unsent; /* the rest of the request, malloc()ed */
	size_t unsent_bytes, unsent_at;
	char *begun; /* the beginning of a head, HTTP1_HEAD_MAX_BYTES; NULL: nothing has arrived */
	size_t begun_bytes;
	struct http1_head head; /* length 0: it is not complete */
	uint64_t left;		/* of the body */
	uint64_t arrived;	/* bytes, since speed was looked at */
	bool unwanted;		/* the body */
	bool paused;		/* nothing is received, because it has no place */
	char *early;		/* what has come before that was known, malloc()ed, or NULL */
	size_t early_bytes;
};

/* Returns that of the fetcher, or NULL when there is no memory. */
struct http1 *http1_pool_of(struct fetcher *fetcher);
/* The same, or NULL when there is none yet. */
struct http1 *http1_pool_if_open(const struct fetcher *fetcher);
/* Returns NULL when there is no memory. */
struct http1_host *http1_host_of(struct http1 *http1, const struct http1_target *target,
				 uint64_t now_ns);
/* The one last used, which stays idle; or NULL. */
struct http1_connection *http1_idle_of(const struct http1_host *host);
/* It has no request any more, and can have another one. */
void http1_keep_idle(struct http1 *http1, struct http1_connection *connection);
/* It gets one. */
void http1_leave_idle(struct http1_connection *connection);
/* NB: it must not have a request any more. Closing ends in the loop. */
void http1_close(struct http1_connection *connection);
