/* SPDX-License-Identifier: MIT */
#include "server/control_pool.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>

#include "base/cleanup.h"
#include "base/json_text.h"

enum {
	STOP_WAIT_MS = 5000,
	/* Some may still run for clients that are gone. */
	THREADS_MAX = 24,
	JOBS_MAX = 32,
};

struct control_pool {
	struct worker_pool workers;
	pthread_mutex_t lock;
	struct link given, done; /* jobs */
	unsigned jobs;		 /* given */
	int fd;			 /* eventfd */
};

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

static void work(struct pool_job *work)
{
	struct control_job *job = container_of(work, struct control_job, job);
	uint64_t losses = json_text_losses();

	if (!job->line || parse(job))
		job->reply = control_whole(job->kind->work(&job->call), losses);
}

static void has_finished(struct worker_pool *workers, struct pool_job *work)
{
	struct control_pool *pool = workers->owner;
	struct control_job *job = container_of(work, struct control_job, job);

	pthread_mutex_lock(&pool->lock);
	list_remove(&job->link);
	list_append(&pool->done, &job->link);
	pool->jobs--;
	eventfd_write(pool->fd, 1);
	pthread_mutex_unlock(&pool->lock);
}

int control_pool_start(struct control_pool **pool)
{
	struct control_pool *made = calloc(1, sizeof(*made));
	int err;

	if (!made)
		return -ENOMEM;
	made->workers = (struct worker_pool){ .finished = has_finished,
					      .owner = made,
					      .name = "control-worker",
					      .role = CONFINE_FETCH,
					      .most = THREADS_MAX };
	pthread_mutex_init(&made->lock, NULL);
	list_init(&made->given);
	list_init(&made->done);
	made->fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	err = made->fd < 0 ? -errno : worker_pool_start(&made->workers, 1);
	if (err)
		control_pool_stop(made);
	else
		*pool = made;
	return err;
}

static struct control_job *take_from(struct link *jobs)
{
	struct link *first = list_first(jobs);

	if (first)
		list_remove(first);
	return first ? container_of(first, struct control_job, link) : NULL;
}

/* Drops those that have not begun. */
static void drop_jobs(struct control_pool *pool)
{
	struct link *next;

	pthread_mutex_lock(&pool->lock);
	for (struct link *link = pool->given.next; link != &pool->given; link = next) {
		struct control_job *job = container_of(link, struct control_job, link);

		next = link->next;
		__atomic_store_n(&job->call.over, true, __ATOMIC_RELAXED);
		if (!worker_pool_cancel(&pool->workers, &job->job))
			continue;
		list_remove(link);
		control_job_free(job);
	}
	pthread_mutex_unlock(&pool->lock);
}

int control_pool_stop(struct control_pool *pool)
{
	struct control_job *job;
	int err;

	if (!pool)
		return 0;
	drop_jobs(pool);
	err = worker_pool_stop(&pool->workers, STOP_WAIT_MS);
	if (err)
		return err;
	while ((job = take_from(&pool->done)))
		control_job_free(job);
	pthread_mutex_destroy(&pool->lock);
	cleanup_close(&pool->fd);
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
		list_append(&pool->given, &job->link);
		job->job = (struct pool_job){ .work = work };
		worker_pool_submit(&pool->workers, &job->job);
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
	job = take_from(&pool->done);
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
