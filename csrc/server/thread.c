/* SPDX-License-Identifier: MIT */
#include "server/thread.h"

#include <errno.h>
#include <sys/eventfd.h>

#include "base/clock.h"
#include "base/confine.h"
#include "server/sandbox.h"

/* Keeps to `cpus`, as far as this process may use them. */
static void choose_cpus(const struct thread *thread)
{
	cpu_set_t cpus;

	if (sched_getaffinity(0, sizeof(cpus), &cpus))
		return;
	CPU_AND(&cpus, &cpus, &thread->cpus);
	if (CPU_COUNT(&cpus))
		sched_setaffinity(0, sizeof(cpus), &cpus);
}

static int thread_init(struct thread *thread)
{
	int err;

	choose_cpus(thread);
	err = sandbox_io_thread();
	if (!err)
		err = thread->ops->init(thread->owner);
	if (!err)
		confine_thread(CONFINE_IO);
	return err;
}

static void *thread_main(void *argument)
{
	struct thread *thread = argument;

	int err = thread_init(thread);

	thread->start_error = err;
	sem_post(&thread->started);
	if (err) {
		thread->ops->deinit(thread->owner);
		return NULL;
	}
	thread->error = thread->ops->serve(thread->owner);
	/* Also without an error: the kernel's side may have been ended from outside. */
	eventfd_write(thread->ended_fd, 1);
	thread->ops->deinit(thread->owner);
	return NULL;
}

int thread_start(struct thread *thread)
{
	int err;

	sem_init(&thread->started, 0, 0);
	err = -pthread_create(&thread->id, NULL, thread_main, thread);
	if (err) {
		sem_destroy(&thread->started);
		return err;
	}
	while (sem_wait(&thread->started) && errno == EINTR)
		;
	err = thread->start_error;
	/* Join it here, so that the caller joins only threads that serve. */
	if (err)
		thread_join(thread);
	return err;
}

void thread_join(struct thread *thread)
{
	pthread_join(thread->id, NULL);
	sem_destroy(&thread->started);
}

bool thread_join_within(struct thread *thread, unsigned wait_ms)
{
	if (!clock_join(thread->id, wait_ms))
		return false;
	sem_destroy(&thread->started);
	return true;
}
