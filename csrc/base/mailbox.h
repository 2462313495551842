/* SPDX-License-Identifier: MIT */
/*
 * What any thread gives to one: a stack without a lock. Who puts something into an empty one wakes
 * the receiver, who takes all there is.
 */
#ifndef BASE_MAILBOX_H
#define BASE_MAILBOX_H

#include <stdbool.h>
#include <stddef.h>

struct mail {
	struct mail *next;
};

struct mailbox {
	struct mail *newest; /* atomic */
};

/* Returns whether it was empty: then the receiver is to be woken. */
static inline bool mailbox_put(struct mailbox *box, struct mail *mail)
{
	struct mail *newest = __atomic_load_n(&box->newest, __ATOMIC_RELAXED);

	do
		mail->next = newest;
	while (!__atomic_compare_exchange_n(&box->newest, &newest, mail, true, __ATOMIC_RELEASE,
					    __ATOMIC_RELAXED));
	return !newest;
}

/* All of it, the oldest first, linked by `next`. */
static inline struct mail *mailbox_take(struct mailbox *box)
{
	struct mail *newest = __atomic_exchange_n(&box->newest, NULL, __ATOMIC_ACQUIRE);
	struct mail *oldest = NULL;

	while (newest) {
		struct mail *next = newest->next;

		newest->next = oldest;
		oldest = newest;
		newest = next;
	}
	return oldest;
}

#endif
