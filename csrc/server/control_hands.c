/* SPDX-License-Identifier: MIT */
#include "server/control_hands.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#include "base/message.h"
#include "lazy/hands.h"
#include "server/sandbox.h"

enum {
	STACK_BYTES = 256 << 10, /* mlock()ed as a whole */
	STOP_WAIT_S = 5,
	/* Of clients that are there, and of some that left their work behind. */
	THREADS_MAX = 24,
	JOBS_MAX = 32,
};

struct queue {
	struct control_job *first;
	struct control_job **end;
};

struct control_hands {
	pthread_mutex_t lock;
	pthread_cond_t changed;
	struct queue given, done;
	struct control_job *working; /* linked by `next` as well */
	unsigned threads, idle;
	unsigned jobs; /* given, and not done */
	bool stopping;
	int fd; /* eventfd */
};

static void *hand_main(void *argument);

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

/* With the lock held. */
static int add_thread(struct control_hands *hands)
{
	pthread_attr_t attributes;
	pthread_t id;
	int err;

	pthread_attr_init(&attributes);
	pthread_attr_setstacksize(&attributes, STACK_BYTES);
	pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
	err = -pthread_create(&id, &attributes, hand_main, hands);
	pthread_attr_destroy(&attributes);
	if (!err)
		hands->threads++;
	return err;
}

/* Returns false when the message is to be answered elsewhere. */
static bool parse(struct control_job *job)
{
	json_error_t error;

	job->call.message = json_loadb(job->line, job->length, JSON_REJECT_DUPLICATES, &error);
	free(job->line);
	job->line = NULL;
	if (!job->call.message) {
		job->reply = control_error("not valid JSON");
		return false;
	}
	job->kind = control_kind_of(job->call.message, &job->reply);
	return job->kind && job->kind->work;
}

static void work(struct control_job *job)
{
	if (!job->line || parse(job))
		job->reply = job->kind->work(&job->call);
}

static void unlink_working(struct control_hands *hands, const struct control_job *job)
{
	struct control_job **link = &hands->working;

	while (*link != job)
		link = &(*link)->next;
	*link = job->next;
}

/* With the lock held, which it gives away meanwhile. */
static void do_job(struct control_hands *hands, struct control_job *job)
{
	job->next = hands->working;
	hands->working = job;
	/* NB: so that nothing waits for this one; it does where there is no other thread. */
	if (!hands->idle && !hands->stopping && hands->threads < THREADS_MAX)
		add_thread(hands);
	pthread_mutex_unlock(&hands->lock);
	/* Memory reclaim must not wait for the device, which may wait for what we hold. */
	sandbox_io_thread();
	work(job);
	pthread_mutex_lock(&hands->lock);
	unlink_working(hands, job);
	hands->jobs--;
	put(&hands->done, job);
	eventfd_write(hands->fd, 1);
}

static void *hand_main(void *argument)
{
	struct control_hands *hands = argument;
	struct control_job *job;

	lazy_thread_init("control-hand");
	pthread_mutex_lock(&hands->lock);
	/* One that is idle is enough. */
	while (!hands->stopping && !hands->idle) {
		hands->idle++;
		while (!hands->stopping && !hands->given.first)
			pthread_cond_wait(&hands->changed, &hands->lock);
		hands->idle--;
		job = hands->stopping ? NULL : take(&hands->given);
		while (job) {
			do_job(hands, job);
			job = hands->stopping ? NULL : take(&hands->given);
		}
	}
	hands->threads--;
	pthread_cond_broadcast(&hands->changed);
	pthread_mutex_unlock(&hands->lock);
	return NULL;
}

int control_hands_start(struct control_hands **hands)
{
	struct control_hands *made = calloc(1, sizeof(*made));
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
		control_hands_stop(made);
	else
		*hands = made;
	return err;
}

int control_hands_stop(struct control_hands *hands)
{
	struct timespec deadline;
	struct control_job *job;
	int err = 0;

	if (!hands)
		return 0;
	clock_gettime(CLOCK_MONOTONIC, &deadline);
	deadline.tv_sec += STOP_WAIT_S;
	pthread_mutex_lock(&hands->lock);
	hands->stopping = true;
	for (job = hands->working; job; job = job->next)
		__atomic_store_n(&job->call.over, true, __ATOMIC_RELAXED);
	pthread_cond_broadcast(&hands->changed);
	while (hands->threads && !err)
		err = -pthread_cond_timedwait(&hands->changed, &hands->lock, &deadline);
	pthread_mutex_unlock(&hands->lock);
	if (err)
		return err;
	while ((job = take(&hands->given)) || (job = take(&hands->done)))
		control_job_free(job);
	pthread_cond_destroy(&hands->changed);
	pthread_mutex_destroy(&hands->lock);
	close(hands->fd);
	free(hands);
	return 0;
}

int control_hands_fd(const struct control_hands *hands)
{
	return hands ? hands->fd : -1;
}

bool control_hands_give(struct control_hands *hands, struct control_job *job)
{
	bool taken;

	pthread_mutex_lock(&hands->lock);
	taken = hands->jobs < JOBS_MAX;
	if (taken) {
		hands->jobs++;
		put(&hands->given, job);
		pthread_cond_broadcast(&hands->changed);
	}
	pthread_mutex_unlock(&hands->lock);
	return taken;
}

struct control_job *control_hands_take(struct control_hands *hands)
{
	struct control_job *job;
	eventfd_t count;

	eventfd_read(hands->fd, &count);
	pthread_mutex_lock(&hands->lock);
	job = take(&hands->done);
	pthread_mutex_unlock(&hands->lock);
	return job;
}

void control_job_free(struct control_job *job)
{
	if (!job)
		return;
	if (job->call.fd >= 0)
		close(job->call.fd);
	json_decref(job->call.message);
	json_decref(job->reply);
	free(job->line);
	free(job);
}
