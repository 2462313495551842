/* SPDX-License-Identifier: MIT */
#include "tests/fetcher.h"

#include <stdlib.h>
#include <string.h>

#include "tests/fuzz.h"

enum { JOBS_MAX = 1024, EXPIRES_MAX = 2000 };

uv_loop_t fuzz_loop;
uint64_t fuzz_now_ns, fuzz_budget;
unsigned fuzz_job_count;

static struct pool_job *jobs[JOBS_MAX];

/* The clock: our code sees no other monotonic one (-Wl,--wrap). */
int __wrap_clock_gettime(clockid_t clock, struct timespec *now);
int __real_clock_gettime(clockid_t clock, struct timespec *now);

int __wrap_clock_gettime(clockid_t clock, struct timespec *now)
{
	if (clock != CLOCK_MONOTONIC)
		return __real_clock_gettime(clock, now);
	now->tv_sec = (time_t)(fuzz_now_ns / NS_PER_S);
	now->tv_nsec = (long)(fuzz_now_ns % NS_PER_S);
	return 0;
}

static struct link timers;

int timer_queue_init(struct timer_queue *queue, struct uv_loop_s *loop)
{
	(void)queue, (void)loop;
	/* All queues are one. */
	if (!timers.next)
		list_init(&timers);
	return 0;
}

void timer_queue_deinit(struct timer_queue *queue)
{
	(void)queue;
	/* All queues go together. */
	list_init(&timers);
}

void timer_set(struct timer_queue *queue, struct timer *timer, uint64_t at_ns)
{
	(void)queue;
	timer_clear(timer);
	timer->at_ns = at_ns;
	list_append(&timers, &timer->link);
}

void timer_clear(struct timer *timer)
{
	list_remove(&timer->link);
}

bool fuzz_has_timers(void)
{
	return timers.next && !list_is_empty(&timers);
}

static struct timer *first_timer(void)
{
	struct timer *first = NULL;

	list_for_each (struct timer, timer, &timers, link) {
		if (!first || timer->at_ns < first->at_ns)
			first = timer;
	}
	return first;
}

void fuzz_pass(uint64_t ns)
{
	uint64_t until_ns = fuzz_now_ns + ns;
	struct timer *timer;

	for (unsigned i = 0; i < EXPIRES_MAX && fuzz_has_timers() && (timer = first_timer()); i++) {
		if (timer->at_ns > until_ns)
			break;
		if (timer->at_ns > fuzz_now_ns)
			fuzz_now_ns = timer->at_ns;
		timer_clear(timer);
		timer->expire(timer);
	}
	fuzz_now_ns = until_ns;
}

/* The fetcher. */

static void submit(struct fetcher *fetcher, struct pool_job *job)
{
	(void)fetcher;
	fuzz_require(fuzz_job_count < JOBS_MAX, "too many jobs");
	jobs[fuzz_job_count++] = job;
}

static bool cancel(struct fetcher *fetcher, struct pool_job *job)
{
	(void)fetcher, (void)job;
	return false;
}

static const struct fetcher_ops ops = { .submit = submit, .cancel = cancel, .spawn = submit };
struct fetcher fuzz_fetcher = { .ops = &ops, .loop = &fuzz_loop };

void fuzz_do_job(unsigned number)
{
	struct pool_job *job = jobs[number];

	jobs[number] = jobs[--fuzz_job_count];
	job->work(job);
	job->done(job);
}

void fuzz_do_jobs(void)
{
	while (fuzz_job_count)
		fuzz_do_job(0);
}

void fuzz_drop_event(const struct event *event, const char *text)
{
	(void)event, (void)text;
}

static struct fuzz_request *request_of(struct run *run)
{
	return container_of(run, struct fuzz_request, run);
}

static int space(struct run *run, struct iovec *parts, int room)
{
	struct fuzz_request *request = request_of(run);
	uint32_t left = run->length - request->filled, at = request->filled;
	int count = 0;

	fuzz_require(request->active, "bytes for a run that is over");
	if (left > fuzz_budget)
		left = (uint32_t)fuzz_budget;
	request->offered = left;
	request->waits = !left;
	/* As units are: several places, one behind the other. */
	for (; left && count < room; count++) {
		uint32_t part = left > 65536 ? 65536 : left;

		parts[count] = (struct iovec){ request->data + at, part };
		at += part;
		left -= part;
	}
	return count;
}

static void take(struct run *run, size_t bytes)
{
	struct fuzz_request *request = request_of(run);

	fuzz_require(request->active && bytes <= request->offered, "more than there is place for");
	request->filled += (uint32_t)bytes;
	request->offered -= (uint32_t)bytes;
	fuzz_budget -= bytes;
}

static void over(struct run *run)
{
	struct fuzz_request *request = request_of(run);

	fuzz_require(request->active, "a run is over twice");
	fuzz_require(run->result <= 0, "no errno");
	fuzz_require(run->result || request->filled == run->length, "success without all bytes");
	fuzz_require(strlen(run->error.text) < sizeof(run->error.text), "a text without an end");
	free(run->identity);
	free(request->data);
	run->identity = NULL;
	request->data = NULL;
	request->active = false;
}

static void widen(struct run *run)
{
	struct fuzz_request *request = request_of(run);

	fuzz_require(request->active && run->widens && !request->filled, "all of it too late");
	run->widens = false;
	run->offset = 0;
	run->length = (uint32_t)run->mirror->source->object_bytes;
	free(request->data);
	request->data = malloc(run->length);
	if (!request->data)
		abort();
}

static const struct run_sink sink = {
	.space = space,
	.take = take,
	.widen = widen,
	.over = over,
};

void fuzz_request_start(struct fuzz_request *request)
{
	const struct mirror_ops *kind = request->run.mirror->ops;

	request->active = true;
	request->run.sink = &sink;
	request->run.fetcher = &fuzz_fetcher;
	request->data = malloc(request->run.length);
	if (!request->data)
		abort();
	/* Some are started as by a reader's thread. */
	fuzz_fetcher.visited = request->run.length & 1 && kind->ready && kind->ready(&request->run);
	kind->start(&request->run);
	fuzz_fetcher.visited = false;
}
