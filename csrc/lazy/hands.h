/* SPDX-License-Identifier: MIT */
/*
 * Hands: threads for what blocks. They stay in the mount namespace that they were started in, and
 * keep no directory of it busy.
 */
#ifndef LAZY_HANDS_H
#define LAZY_HANDS_H

#include <pthread.h>
#include <stdbool.h>

#include "lazy/fetcher.h"

enum {
#ifdef __SANITIZE_THREAD__
	LAZY_STACK_BYTES = 8 << 20, /* its own data of a thread alone are 1 MiB */
#else
	LAZY_STACK_BYTES = 256 << 10, /* mlock()ed as a whole */
#endif
};

struct hands {
	/* Set by the caller: called on the hand, with a job whose work is done. */
	void (*worked)(struct hands *hands, struct hand_job *job);
	const char *name; /* of the threads, at most 15 characters */
	/* How many at a time work on one place, and are left when all others do so; 0: any, none. */
	unsigned most_of_place, spare;

	/* Its own. */
	pthread_mutex_t lock;
	pthread_cond_t more;
	struct mail *oldest, *newest;
	pthread_t *threads;
	uint64_t *places; /* of what each works on; 0: no place, or nothing */
	unsigned count, numbered;
	bool ending;
};

/* Returns 0 or a negative errno. */
int hands_start(struct hands *hands, unsigned count);
/* They end once all jobs are done. */
void hands_stop(struct hands *hands);
/* Any thread. */
void hands_give(struct hands *hands, struct hand_job *job);
/* Take a job back. Returns false when it has begun. */
bool hands_take_back(struct hands *hands, struct hand_job *job);

/*
 * For a thread that outlives the server's move to another mount namespace: no directory of this one is
 * its own, and its allocations never wait for I/O, where that is allowed.
 */
void lazy_thread_init(const char *name);
/* Threads that nobody gives a size get stacks of LAZY_STACK_BYTES: libraries start some. */
int lazy_small_stacks(void);

#endif
