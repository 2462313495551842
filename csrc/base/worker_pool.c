/* SPDX-License-Identifier: MIT */
#include "base/worker_pool.h"

#include <errno.h>
#include <sched.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/message.h"

void lazy_thread_init(const char *name, enum confine_role role)
{
	pthread_setname_np(pthread_self(), name);
	/* Unshare, so that chdir() does not change other threads' directories. */
	if (role != CONFINE_INHERITED && (unshare(CLONE_FS) || chdir("/")))
		msg_warning("a thread (%s) keeps its working directory: %m", name);
	/* NB: 1 means on. The sandbox reports where this is not allowed. */
	if (role != CONFINE_INHERITED)
		prctl(PR_SET_IO_FLUSHER, 1, 0, 0, 0);
	confine_thread(role);
}

int lazy_small_stacks(void)
{
	pthread_attr_t attributes;
	int err;

	pthread_attr_init(&attributes);
	err = pthread_attr_setstacksize(&attributes, LAZY_STACK_BYTES);
	if (!err)
		err = pthread_setattr_default_np(&attributes);
	pthread_attr_destroy(&attributes);
	return -err;
}

static struct pool_job *job_of(struct message *message)
{
	return container_of(message, struct pool_job, ended.message);
}

/* The functions up to add_worker() need the lock, and so does next_job(). */

static bool may_begin(const struct worker_pool *pool, const struct pool_job *job)
{
	unsigned of_place = 0, of_any = 0;

	if (!job->place || !pool->max_per_place)
		return true;
	for (unsigned i = 0; i < pool->count; i++) {
		of_place += pool->places[i] == job->place;
		of_any += pool->places[i] != 0;
	}
	return of_place < pool->max_per_place && of_any + pool->spare < pool->count;
}

static void unlink_job(struct worker_pool *pool, struct message **link)
{
	struct message *message = *link;

	*link = message->next;
	if (pool->newest == message)
		pool->newest = link == &pool->oldest ? NULL :
						       container_of(link, struct message, next);
}

/* Takes the oldest job that may begin out of the queue, or returns NULL. */
static struct pool_job *take_job(struct worker_pool *pool)
{
	for (struct message **link = &pool->oldest; *link; link = &(*link)->next) {
		struct pool_job *job = job_of(*link);

		if (may_begin(pool, job)) {
			unlink_job(pool, link);
			return job;
		}
	}
	return NULL;
}

static int add_worker(struct worker_pool *pool, void *(*run)(void *pool))
{
	pthread_t id;
	int err = -pthread_create(&id, NULL, run, pool);

	pool->running += !err;
	return err;
}

static void work_on(struct worker_pool *pool, uint64_t *place);

/* It inherits its name, its priority and its role. */
static void *run_further_worker(void *pool)
{
	uint64_t unused;

	work_on(pool, &unused);
	return NULL;
}

/* Returns NULL when the worker has to end. */
static struct pool_job *next_job(struct worker_pool *pool, uint64_t *place)
{
	struct pool_job *job;

	*place = 0;
	pool->idle++;
	while (!(job = take_job(pool)) && !pool->ending && pool->idle <= pool->count)
		pthread_cond_wait(&pool->more, &pool->lock);
	pool->idle--;
	if (job)
		*place = job->place;
	/* NB: so that later jobs need not wait for this one. They do where none can be made. */
	if (job && !pool->idle && !pool->ending && pool->running < pool->most)
		add_worker(pool, run_further_worker);
	return job;
}

static void work_on(struct worker_pool *pool, uint64_t *place)
{
	struct pool_job *job;
	pthread_t last;
	bool has_last;

	pthread_mutex_lock(&pool->lock);
	while ((job = next_job(pool, place))) {
		pthread_mutex_unlock(&pool->lock);
		job->work(job);
		pool->finished(pool, job);
		pthread_mutex_lock(&pool->lock);
	}
	last = pool->last;
	has_last = pool->has_last;
	pool->last = pthread_self();
	pool->has_last = true;
	pool->running--;
	pthread_cond_broadcast(&pool->ended);
	pthread_mutex_unlock(&pool->lock);
	if (has_last)
		pthread_join(last, NULL);
}

static void *run_worker(void *argument)
{
	struct worker_pool *pool = argument;
	unsigned number;

	pthread_mutex_lock(&pool->lock);
	number = pool->numbered++;
	pthread_mutex_unlock(&pool->lock);
	/* Of this thread alone; where it is refused, the thread is as others are. */
	if (pool->nice)
		setpriority(PRIO_PROCESS, (id_t)gettid(), pool->nice);
	lazy_thread_init(pool->name, pool->role);
	work_on(pool, &pool->places[number]);
	return NULL;
}

int worker_pool_start(struct worker_pool *pool, unsigned count)
{
	pthread_condattr_t monotonic;
	int err = 0;

	pthread_mutex_init(&pool->lock, NULL);
	pthread_cond_init(&pool->more, NULL);
	pthread_condattr_init(&monotonic);
	pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
	pthread_cond_init(&pool->ended, &monotonic);
	pthread_condattr_destroy(&monotonic);
	pool->oldest = pool->newest = NULL;
	pool->ending = pool->has_last = false;
	pool->count = pool->numbered = pool->running = pool->idle = 0;
	pool->places = calloc(count, sizeof(*pool->places));
	if (!pool->places)
		return -ENOMEM;
	/* Running workers read the count. */
	pthread_mutex_lock(&pool->lock);
	for (; pool->count < count && !err; pool->count += !err)
		err = add_worker(pool, run_worker);
	pthread_mutex_unlock(&pool->lock);
	if (err)
		worker_pool_stop(pool, 0);
	return err;
}

int worker_pool_stop(struct worker_pool *pool, unsigned wait_ms)
{
	uint64_t until_ns = clock_now_ns() + wait_ms * NS_PER_MS;
	const struct timespec until = { .tv_sec = (time_t)(until_ns / NS_PER_S),
					.tv_nsec = (long)(until_ns % NS_PER_S) };
	int err = 0;

	if (!pool->places)
		return 0;
	pthread_mutex_lock(&pool->lock);
	pool->ending = true;
	pthread_cond_broadcast(&pool->more);
	while (pool->running && !err) {
		if (wait_ms)
			err = -pthread_cond_timedwait(&pool->ended, &pool->lock, &until);
		else
			pthread_cond_wait(&pool->ended, &pool->lock);
	}
	pthread_mutex_unlock(&pool->lock);
	if (err)
		return err;
	if (pool->has_last)
		pthread_join(pool->last, NULL);
	free(pool->places);
	pool->places = NULL;
	pthread_cond_destroy(&pool->more);
	pthread_cond_destroy(&pool->ended);
	pthread_mutex_destroy(&pool->lock);
	return 0;
}

void worker_pool_submit(struct worker_pool *pool, struct pool_job *job)
{
	struct message *message = &job->ended.message;

	message->next = NULL;
	pthread_mutex_lock(&pool->lock);
	if (pool->oldest)
		pool->newest->next = message;
	else
		pool->oldest = message;
	pool->newest = message;
	pthread_cond_signal(&pool->more);
	pthread_mutex_unlock(&pool->lock);
}

bool worker_pool_cancel(struct worker_pool *pool, struct pool_job *job)
{
	struct message **link;
	bool found;

	pthread_mutex_lock(&pool->lock);
	for (link = &pool->oldest; *link && *link != &job->ended.message; link = &(*link)->next)
		;
	found = *link;
	if (found)
		unlink_job(pool, link);
	pthread_mutex_unlock(&pool->lock);
	return found;
}
