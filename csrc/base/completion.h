/* SPDX-License-Identifier: MIT */
/*
 * A completion for the fetcher's thread: a message arrived, a job or fetch ended, a timer expired.
 * Embedded in the object it concerns, and in one queue at most. Producers only enqueue it.
 */
#pragma once

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
