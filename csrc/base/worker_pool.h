/* SPDX-License-Identifier: MIT */
/*
 * Pools of threads (workers) for jobs that block. Workers stay in the mount namespace that they
 * were started in, and have no working directory in it.
 */
#pragma once

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/completion.h"
#include "base/confine.h"

enum {
#ifdef __SANITIZE_THREAD__
	/* with this sanitizer, the thread-local data alone take 1 MiB */
	LAZY_STACK_BYTES = 8 << 20,
#else
	LAZY_STACK_BYTES = 256 << 10,
#endif
};

/*
 * A job that blocks: `work` is called on a worker, then `done` on the fetcher's thread. It is a
 * member of whatever it is about.
 */
struct pool_job {
	void (*work)(struct pool_job *job);
	void (*done)(struct pool_job *job);
	/*
	 * A number for what the work may hang on, such as a file system. Only some workers take
	 * jobs of the same place at a time. 0: none.
	 */
	uint64_t place;
	struct completion ended; /* the fetcher's own; its message is the pool's until the end */
};

struct worker_pool {
	/* Set by the caller. Called on the worker when a job's work is done. */
	void (*finished)(struct worker_pool *pool, struct pool_job *job);
	void *owner;	  /* for that function */
	const char *name; /* of the threads, at most 15 characters */
	enum confine_role role;
	/*
	 * How many jobs of one place may run at a time, and how many workers to keep free of jobs
	 * that have a place. 0: no limit, none.
	 */
	unsigned max_per_place, spare;
	int nice; /* what others have more of the CPUs; see nice(2) */
	/*
	 * 0, or how many workers there may be of jobs without a place: a worker that begins a job
	 * while no other waits for one starts another first, which sees the same files. Those that
	 * are too many at rest end.
	 */
	unsigned most;

	/* Internal. */
	pthread_mutex_t lock;
	pthread_cond_t more, ended;
	struct message *oldest, *newest;
	uint64_t *places; /* of the job of each worker; 0: it has no place, or there is no job */
	unsigned count, numbered, running, idle;
	pthread_t last; /* the worker that has ended last, if one has: the next one joins it */
	bool has_last;
	bool ending;
};

/* Starts `count` workers. Returns 0 or a negative errno. */
int worker_pool_start(struct worker_pool *pool, unsigned count);
/*
 * Ends the workers once all jobs are done. Returns 0, or -ETIMEDOUT when some have not ended within
 * `wait_ms` (0: it waits for ever): nothing that they use may be freed then.
 */
int worker_pool_stop(struct worker_pool *pool, unsigned wait_ms);
/* Adds a job. Any thread may call this. */
void worker_pool_submit(struct worker_pool *pool, struct pool_job *job);
/* Takes a job back. Returns false when it has begun. */
bool worker_pool_cancel(struct worker_pool *pool, struct pool_job *job);

/*
 * Prepares a thread that outlives the server's move to another mount namespace: it gets no working
 * directory there, its allocations never wait for I/O where that is allowed, and it is confined to
 * its role.
 */
void lazy_thread_init(const char *name, enum confine_role role);
/* Makes LAZY_STACK_BYTES the default size of stacks, because libraries start threads too. */
int lazy_small_stacks(void);
