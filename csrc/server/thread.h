/* SPDX-License-Identifier: MIT */
/*
 * A thread that serves I/O: it is pinned and protected (sandbox.h), says whether it can serve, and
 * serves until there is nothing more to do.
 */
#ifndef SERVER_THREAD_H
#define SERVER_THREAD_H

#include <pthread.h>
#include <sched.h>
#include <semaphore.h>
#include <stdbool.h>

/* Each is called once, on the thread, and returns 0 or a negative errno. */
struct thread_ops {
	/* Memory that is allocated here comes from the node of the thread's CPUs. */
	int (*init)(void *owner);
	/* Returns when the thread is to end. */
	int (*serve)(void *owner);
	/* Also after init() has failed. */
	void (*deinit)(void *owner);
};

struct thread {
	/* Set by the owner. */
	const struct thread_ops *ops;
	void *owner;
	cpu_set_t cpus; /* to run on */
	bool realtime;	/* run before all that is not (sandbox.h) */
	int ended_fd;	/* eventfd: written when serve() has returned, for whatever reason */

	/* Of serve(), to be looked at after thread_join(). */
	int error;

	/* Its own. */
	pthread_t id;
	sem_t started; /* posted once: init() is over */
	int start_error;
};

/* Waits until the thread serves. Returns 0, or the negative errno of what failed; then it is gone. */
int thread_start(struct thread *thread);
void thread_join(struct thread *thread);
/* Returns false when the thread has not ended within `wait_ms`; then it is still to be joined. */
bool thread_join_within(struct thread *thread, unsigned wait_ms);

#endif
