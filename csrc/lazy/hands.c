/* SPDX-License-Identifier: MIT */
#include "lazy/hands.h"

#include <errno.h>
#include <sched.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <unistd.h>

#include "base/message.h"

void lazy_thread_init(const char *name)
{
	pthread_setname_np(pthread_self(), name);
	/* Of its own, so that no other thread's paths change. */
	if (unshare(CLONE_FS) || chdir("/"))
		msg_warning("a thread (%s) keeps its working directory: %m", name);
	/* NB: 1 means on. The sandbox says where it is not allowed. */
	prctl(PR_SET_IO_FLUSHER, 1, 0, 0, 0);
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

static struct hand_job *job_of(struct mail *mail)
{
	return container_of(mail, struct hand_job, post.mail);
}

/* What follows is under the lock. */

static bool may_begin(const struct hands *hands, const struct hand_job *job)
{
	unsigned of_place = 0, of_any = 0;

	if (!job->place || !hands->most_of_place)
		return true;
	for (unsigned i = 0; i < hands->count; i++) {
		of_place += hands->places[i] == job->place;
		of_any += hands->places[i] != 0;
	}
	return of_place < hands->most_of_place && of_any + hands->spare < hands->count;
}

static void unlink_job(struct hands *hands, struct mail **link)
{
	struct mail *mail = *link;

	*link = mail->next;
	if (hands->newest == mail)
		hands->newest = link == &hands->oldest ? NULL :
							 container_of(link, struct mail, next);
}

/* The oldest one that may begin, out of the queue; NULL: none. */
static struct hand_job *take_job(struct hands *hands)
{
	for (struct mail **link = &hands->oldest; *link; link = &(*link)->next) {
		struct hand_job *job = job_of(*link);

		if (may_begin(hands, job)) {
			unlink_job(hands, link);
			return job;
		}
	}
	return NULL;
}

/* NULL: there will be no more, or others that hands which are at work take later. */
static struct hand_job *next_job(struct hands *hands, unsigned number)
{
	struct hand_job *job;

	pthread_mutex_lock(&hands->lock);
	hands->places[number] = 0;
	while (!(job = take_job(hands)) && !hands->ending)
		pthread_cond_wait(&hands->more, &hands->lock);
	if (job)
		hands->places[number] = job->place;
	pthread_mutex_unlock(&hands->lock);
	return job;
}

static unsigned number_of_next(struct hands *hands)
{
	unsigned number;

	pthread_mutex_lock(&hands->lock);
	number = hands->numbered++;
	pthread_mutex_unlock(&hands->lock);
	return number;
}

static void *hand_main(void *argument)
{
	struct hands *hands = argument;
	unsigned number = number_of_next(hands);
	struct hand_job *job;

	lazy_thread_init(hands->name);
	while ((job = next_job(hands, number))) {
		job->work(job);
		hands->worked(hands, job);
	}
	return NULL;
}

int hands_start(struct hands *hands, unsigned count)
{
	pthread_mutex_init(&hands->lock, NULL);
	pthread_cond_init(&hands->more, NULL);
	hands->oldest = hands->newest = NULL;
	hands->ending = false;
	hands->count = hands->numbered = 0;
	hands->threads = calloc(count, sizeof(*hands->threads));
	hands->places = calloc(count, sizeof(*hands->places));
	if (!hands->threads || !hands->places) {
		free(hands->threads);
		free(hands->places);
		hands->threads = NULL;
		return -ENOMEM;
	}
	while (hands->count < count) {
		int err = pthread_create(&hands->threads[hands->count], NULL, hand_main, hands);

		if (err) {
			hands_stop(hands);
			return -err;
		}
		/* Those that run look at it. */
		pthread_mutex_lock(&hands->lock);
		hands->count++;
		pthread_mutex_unlock(&hands->lock);
	}
	return 0;
}

void hands_stop(struct hands *hands)
{
	if (!hands->threads)
		return;
	pthread_mutex_lock(&hands->lock);
	hands->ending = true;
	pthread_cond_broadcast(&hands->more);
	pthread_mutex_unlock(&hands->lock);
	for (unsigned i = 0; i < hands->count; i++)
		pthread_join(hands->threads[i], NULL);
	free(hands->threads);
	free(hands->places);
	hands->threads = NULL;
	pthread_cond_destroy(&hands->more);
	pthread_mutex_destroy(&hands->lock);
}

void hands_give(struct hands *hands, struct hand_job *job)
{
	struct mail *mail = &job->post.mail;

	mail->next = NULL;
	pthread_mutex_lock(&hands->lock);
	if (hands->oldest)
		hands->newest->next = mail;
	else
		hands->oldest = mail;
	hands->newest = mail;
	pthread_cond_signal(&hands->more);
	pthread_mutex_unlock(&hands->lock);
}

bool hands_take_back(struct hands *hands, struct hand_job *job)
{
	struct mail **link;
	bool found;

	pthread_mutex_lock(&hands->lock);
	for (link = &hands->oldest; *link && *link != &job->post.mail; link = &(*link)->next)
		;
	found = *link;
	if (found)
		unlink_job(hands, link);
	pthread_mutex_unlock(&hands->lock);
	return found;
}
