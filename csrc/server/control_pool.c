/* SPDX-License-Identifier: MIT */
#include "server/control_pool.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#include "base/cleanup.h"
#include "base/json_text.h"
#include "base/message.h"
#include "base/worker_pool.h"

enum {
	STOP_WAIT_S = 5,
	/* Some may still run for clients that are gone. */
	THREADS_MAX = 24,
	JOBS_MAX = 32,
};

struct queue {
	struct control_job *first;
	struct control_job **end;
};

struct control_pool {
	pthread_mutex_t lock;
	pthread_cond_t changed;
	struct queue given, done;
	struct control_job *working; /* linked by `next` as well */
	unsigned threads, idle;
	unsigned jobs; /* submitted, and not done */
	bool stopping, confined;
	int fd; /* eventfd */
};

static void *worker_main(void *argument);

static void put(struct queue *queue, struct control_job *job)
{
	job->next = NULL;
	*queue->end = job;
	queue->end = &job->next;
}

static struct control_job *take(struct queue *queue)
{
	struct control_job *job = queue->first;

	if (!job)
		return NULL;
	queue->first = job->next;
	if (!queue->first)
		queue->end = &queue->first;
	return job;
}

/* To be called with the lock held. */
static int add_thread(struct control_pool *pool)
{
	pthread_t id;
	int err = -pthread_create(&id, NULL, worker_main, pool);

	if (err)
		return err;
	pthread_detach(id);
	pool->threads++;
	return 0;
}

/* Returns false when the main thread has to answer the message. */
static bool parse(struct control_job *job)
{
	json_error_t error;

	job->call.message = json_text_parse(job->line, job->length, JSON_REJECT_DUPLICATES, &error);
	free(job->line);
	job->line = NULL;
	if (!job->call.message) {
		job->reply = control_error(json_text_fault(&error));
		return false;
	}
	job->kind = control_kind_of(job->call.message, &job->reply);
	return job->kind && job->kind->work;
}

static void work(struct control_job *job)
{
	uint64_t losses = json_text_losses();

	if (!job->line || parse(job))
		job->reply = control_whole(job->kind->work(&job->call), losses);
}

static void unlink_working(struct control_pool *pool, const struct control_job *job)
{
	struct control_job **link = &pool->working;

	while (*link != job)
		link = &(*link)->next;
	*link = job->next;
}

/* To be called with the lock held, which is released meanwhile. */
static void do_job(struct control_pool *pool, struct control_job *job)
{
	job->next = pool->working;
	pool->working = job;
	/*
	 * NB: another thread, so that later jobs need not wait for this one. They do where none can
	 * be made.
	 */
	if (!pool->idle && !pool->stopping && pool->threads < THREADS_MAX)
		add_thread(pool);
	pthread_mutex_unlock(&pool->lock);
	work(job);
	pthread_mutex_lock(&pool->lock);
	unlink_working(pool, job);
	pool->jobs--;
	put(&pool->done, job);
	eventfd_write(pool->fd, 1);
}

static void *worker_main(void *argument)
{
	struct control_pool *pool = argument;
	struct control_job *job;

	pthread_mutex_lock(&pool->lock);
	/* Later threads inherit this from the first one. */
	if (!pool->confined) {
		pool->confined = true;
		lazy_thread_init("control-worker", CONFINE_FETCH);
	}
	/* One idle thread is enough. */
	while (!pool->stopping && !pool->idle) {
		pool->idle++;
		while (!pool->stopping && !pool->given.first)
			pthread_cond_wait(&pool->changed, &pool->lock);
		pool->idle--;
		job = pool->stopping ? NULL : take(&pool->given);
		while (job) {
			do_job(pool, job);
			job = pool->stopping ? NULL : take(&pool->given);
		}
	}
	pool->threads--;
	pthread_cond_broadcast(&pool->changed);
	pthread_mutex_unlock(&pool->lock);
	return NULL;
}

int control_pool_start(struct control_pool **pool)
{
	struct control_pool *made = calloc(1, sizeof(*made));
	pthread_condattr_t attributes;
	int err;

	if (!made)
		return -ENOMEM;
	made->fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	if (made->fd < 0) {
		err = -errno;
		free(made);
		return err;
	}
	made->given.end = &made->given.first;
	made->done.end = &made->done.first;
	pthread_mutex_init(&made->lock, NULL);
	pthread_condattr_init(&attributes);
	pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
	pthread_cond_init(&made->changed, &attributes);
	pthread_condattr_destroy(&attributes);
	pthread_mutex_lock(&made->lock);
	err = add_thread(made);
	pthread_mutex_unlock(&made->lock);
	if (err)
		control_pool_stop(made);
	else
		*pool = made;
	return err;
}

int control_pool_stop(struct control_pool *pool)
{
	struct timespec deadline;
	struct control_job *job;
	int err = 0;

	if (!pool)
		return 0;
	clock_gettime(CLOCK_MONOTONIC, &deadline);
	deadline.tv_sec += STOP_WAIT_S;
	pthread_mutex_lock(&pool->lock);
	pool->stopping = true;
	for (job = pool->working; job; job = job->next)
		__atomic_store_n(&job->call.over, true, __ATOMIC_RELAXED);
	pthread_cond_broadcast(&pool->changed);
	while (pool->threads && !err)
		err = -pthread_cond_timedwait(&pool->changed, &pool->lock, &deadline);
	pthread_mutex_unlock(&pool->lock);
	if (err)
		return err;
	while ((job = take(&pool->given)) || (job = take(&pool->done)))
		control_job_free(job);
	pthread_cond_destroy(&pool->changed);
	pthread_mutex_destroy(&pool->lock);
	close(pool->fd);
	free(pool);
	return 0;
}

int control_pool_fd(const struct control_pool *pool)
{
	return pool ? pool->fd : -1;
}

bool control_pool_submit(struct control_pool *pool, struct control_job *job)
{
	bool taken;

	pthread_mutex_lock(&pool->lock);
	taken = pool->jobs < JOBS_MAX;
	if (taken) {
		pool->jobs++;
		put(&pool->given, job);
		pthread_cond_broadcast(&pool->changed);
	}
	pthread_mutex_unlock(&pool->lock);
	return taken;
}

struct control_job *control_pool_take(struct control_pool *pool)
{
	struct control_job *job;
	eventfd_t count;

	eventfd_read(pool->fd, &count);
	pthread_mutex_lock(&pool->lock);
	job = take(&pool->done);
	pthread_mutex_unlock(&pool->lock);
	return job;
}

void control_job_free(struct control_job *job)
{
	if (!job)
		return;
	cleanup_close(&job->call.fd);
	json_decref(job->call.message);
	json_decref(job->reply);
	free(job->line);
	free(job);
}
