/* SPDX-License-Identifier: MIT */
#include "server/frontend/fuse_allocator.h"

#include <errno.h>
#include <poll.h>
#include <sys/eventfd.h>

#include "base/clock.h"
#include "base/confine.h"
#include "base/relaxed.h"

enum {
	STACK_BYTES = 128 << 10,
	RETRY_MS = 500, /* retry after memory was short */
	IDLE_MS = 2000, /* records are given back after that long without a request */
	STOP_WAIT_MS = 1000,
};

/* Returns false when memory is short. */
static bool meet_need(struct fuse_queue *queue)
{
	if (__atomic_load_n(&queue->need, __ATOMIC_ACQUIRE) != FUSE_NEED_RECORD)
		return true;
	if (fuse_record_fill(&queue->records, queue->wanted))
		return false;
	__atomic_store_n(&queue->need, FUSE_NEED_MET, __ATOMIC_RELEASE);
	eventfd_write(queue->filled_fd, 1);
	return true;
}

/* Returns whether the queue has more records than it keeps, with the one that it has yet to take. */
static bool look_at(struct fuse_queue *queue, bool time_is_up)
{
	unsigned received = relaxed_load(&queue->received);

	if (relaxed_load(&queue->filled) <= FUSE_KEPT_RECORDS &&
	    relaxed_load(&queue->need) != FUSE_NEED_MET)
		return false;
	if (time_is_up && received == queue->received_before) {
		relaxed_store(&queue->give_back, true);
		/*
		 * A signal that comes just before the thread waits is lost; the next one follows
		 * soon.
		 */
		pthread_kill(queue->thread.id, FUSE_QUEUE_SIGNAL);
	}
	if (time_is_up)
		queue->received_before = received;
	return true;
}

static void *allocator_main(void *argument)
{
	struct fuse_allocator *allocator = argument;
	struct pollfd wake = { .fd = allocator->wake_fd, .events = POLLIN };
	bool time_is_up = false;

	pthread_setname_np(pthread_self(), "allocator");
	confine_thread(CONFINE_IO);
	while (!__atomic_load_n(&allocator->ending, __ATOMIC_ACQUIRE)) {
		bool met = true, more = false;
		eventfd_t unused;

		for (unsigned i = 0; i < allocator->count; i++) {
			met &= meet_need(&allocator->queues[i]);
			more |= look_at(&allocator->queues[i], time_is_up);
		}
		time_is_up = !poll(&wake, 1, !met ? RETRY_MS : more ? IDLE_MS : -1);
		if (!time_is_up)
			eventfd_read(allocator->wake_fd, &unused);
	}
	return NULL;
}

int fuse_allocator_start(struct fuse_allocator *allocator)
{
	pthread_attr_t attributes;
	int err;

	pthread_attr_init(&attributes);
	pthread_attr_setstacksize(&attributes, STACK_BYTES);
	err = -pthread_create(&allocator->thread, &attributes, allocator_main, allocator);
	pthread_attr_destroy(&attributes);
	allocator->running = !err;
	return err;
}

bool fuse_allocator_stop(struct fuse_allocator *allocator)
{
	if (!allocator->running)
		return true;
	__atomic_store_n(&allocator->ending, true, __ATOMIC_RELEASE);
	eventfd_write(allocator->wake_fd, 1);
	allocator->running = !clock_join(allocator->thread, STOP_WAIT_MS);
	return !allocator->running;
}
