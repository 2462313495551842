/* SPDX-License-Identifier: MIT */
/*
 * A thread that gets pages for the records of queues that need more, and makes idle queues give
 * back all but one. A queue must not wait for memory, because its answers may be what frees some.
 * So this thread waits, and the queue goes on with the records that it has.
 */
#pragma once

#include <pthread.h>
#include <stdbool.h>

#include "server/frontend/fuse_queue.h"

struct fuse_allocator {
	/* Set by the owner. */
	struct fuse_queue *queues; /* those that have been started */
	unsigned count;
	int wake_fd; /* eventfd, the `allocator_fd` of all queues */

	/* Internal. */
	pthread_t thread;
	bool running;
	bool ending; /* atomic */
};

/* Returns 0 or a negative errno. */
int fuse_allocator_start(struct fuse_allocator *allocator);
/*
 * May be called even if it was not started. Returns false when it still waits for memory: then the
 * queues must not be freed.
 */
bool fuse_allocator_stop(struct fuse_allocator *allocator);
