/* SPDX-License-Identifier: MIT */
#include "base/worker_pool.h"

#include <errno.h>
#include <sched.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <unistd.h>

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

/* The functions before next_job() need the lock. */

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

/* Returns NULL when the pool is ending and no job is left that this worker may begin. */
static struct pool_job *next_job(struct worker_pool *pool, unsigned number)
{
	struct pool_job *job;

	pthread_mutex_lock(&pool->lock);
	pool->places[number] = 0;
	while (!(job = take_job(pool)) && !pool->ending)
		pthread_cond_wait(&pool->more, &pool->lock);
	if (job)
		pool->places[number] = job->place;
	pthread_mutex_unlock(&pool->lock);
	return job;
}

static unsigned number_of_next(struct worker_pool *pool)
{
	unsigned number;

	pthread_mutex_lock(&pool->lock);
	number = pool->numbered++;
	pthread_mutex_unlock(&pool->lock);
	return number;
}

static void *worker_main(void *argument)
{
	struct worker_pool *pool = argument;
	unsigned number = number_of_next(pool);
	struct pool_job *job;

	/* Of this thread alone; where it is refused, the thread is as others are. */
	if (pool->nice)
		setpriority(PRIO_PROCESS, (id_t)gettid(), pool->nice);
	lazy_thread_init(pool->name, pool->role);
	while ((job = next_job(pool, number))) {
		job->work(job);
		pool->finished(pool, job);
	}
	return NULL;
}

int worker_pool_start(struct worker_pool *pool, unsigned count)
{
	pthread_mutex_init(&pool->lock, NULL);
	pthread_cond_init(&pool->more, NULL);
	pool->oldest = pool->newest = NULL;
	pool->ending = false;
	pool->count = pool->numbered = 0;
	pool->threads = calloc(count, sizeof(*pool->threads));
	pool->places = calloc(count, sizeof(*pool->places));
	if (!pool->threads || !pool->places) {
		free(pool->threads);
		free(pool->places);
		pool->threads = NULL;
		return -ENOMEM;
	}
	while (pool->count < count) {
		int err = pthread_create(&pool->threads[pool->count], NULL, worker_main, pool);

		if (err) {
			worker_pool_stop(pool);
			return -err;
		}
		/* Running workers read the count. */
		pthread_mutex_lock(&pool->lock);
		pool->count++;
		pthread_mutex_unlock(&pool->lock);
	}
	return 0;
}

void worker_pool_stop(struct worker_pool *pool)
{
	if (!pool->threads)
		return;
	pthread_mutex_lock(&pool->lock);
	pool->ending = true;
	pthread_cond_broadcast(&pool->more);
	pthread_mutex_unlock(&pool->lock);
	for (unsigned i = 0; i < pool->count; i++)
		pthread_join(pool->threads[i], NULL);
	free(pool->threads);
	free(pool->places);
	pool->threads = NULL;
	pthread_cond_destroy(&pool->more);
	pthread_mutex_destroy(&pool->lock);
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
