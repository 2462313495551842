/* SPDX-License-Identifier: MIT */
/*
 * A thread that serves I/O. It is pinned and protected (sandbox.h), reports whether it can serve,
 * and serves until there is nothing more to do.
 */
#pragma once

#include <pthread.h>
#include <sched.h>
#include <semaphore.h>
#include <stdbool.h>

/* Each function is called once, on the thread, and returns 0 or a negative errno. */
struct thread_ops {
	/* Memory that is allocated here comes from the NUMA node of the thread's CPUs. */
	int (*init)(void *owner);
	/* Returns when the thread shall end. */
	int (*serve)(void *owner);
	/* Is called even if init() has failed. */
	void (*deinit)(void *owner);
};

struct thread {
	/* Set by the owner. */
	const struct thread_ops *ops;
	void *owner;
	cpu_set_t cpus; /* to run on; none: on any */
	int ended_fd;	/* eventfd, written when serve() has returned for whatever reason */

	/* The result of serve(), to be read after thread_join(). */
	int error;

	/* Internal. */
	pthread_t id;
	sem_t started; /* posted once, when init() is over */
	int start_error;
};

/* Waits until the thread serves. Returns 0; or a negative errno, and the thread is gone. */
int thread_start(struct thread *thread);
void thread_join(struct thread *thread);
/* Returns false when the thread has not ended within `wait_ms`; it must be joined later. */
bool thread_join_within(struct thread *thread, unsigned wait_ms);
