/* SPDX-License-Identifier: MIT */
/*
 * News of something that belongs to the fetcher's thread: a message, the end of a job or fetch, a
 * timer. Whoever has news only queues it. It is a member of what it is about, and queued once at
 * most.
 */
#ifndef LAZY_COMPLETION_H
#define LAZY_COMPLETION_H

#include "base/list.h"
#include "base/message_queue.h"

struct core;

struct completion {
	union {
		struct link link;	/* in the core's queue */
		struct message message; /* on its way from another thread */
	};
	/* Called on the fetcher's thread. It may free the completion. */
	void (*take)(struct core *core, struct completion *completion);
};

#endif
