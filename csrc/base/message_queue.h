/* SPDX-License-Identifier: MIT */
/*
 * A queue of messages from any thread to one receiver, without a lock. A thread that puts a
 * message into an empty queue wakes the receiver, which takes all messages at once.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>

struct message {
	struct message *next;
};

struct message_queue {
	struct message *newest; /* atomic */
};

/* Returns whether the queue was empty: then the caller wakes the receiver. */
static inline bool message_queue_put(struct message_queue *queue, struct message *message)
{
	struct message *newest = __atomic_load_n(&queue->newest, __ATOMIC_RELAXED);

	do
		message->next = newest;
	while (!__atomic_compare_exchange_n(&queue->newest, &newest, message, true,
					    __ATOMIC_RELEASE, __ATOMIC_RELAXED));
	return !newest;
}

/* Returns all messages, the oldest first, linked by `next`. */
static inline struct message *message_queue_take(struct message_queue *queue)
{
	struct message *newest = __atomic_exchange_n(&queue->newest, NULL, __ATOMIC_ACQUIRE);
	struct message *oldest = NULL;

	while (newest) {
		struct message *next = newest->next;

		newest->next = oldest;
		oldest = newest;
		newest = next;
	}
	return oldest;
}
