/* SPDX-License-Identifier: MIT */
#include "fetch/timer_queue.h"

#include <errno.h>
#include <stdlib.h>
#include <uv.h>

#include "fetch/fetcher_ops.h"

struct timer_handles {
	uv_timer_t timer;
	uv_prepare_t prepare;
};

static struct timer *first_timer(const struct timer_queue *queue)
{
	struct link *first = list_first(&queue->timers);

	return first ? container_of(first, struct timer, link) : NULL;
}

static void expire_due(uv_timer_t *uv_timer);

/* libuv reads its clock only once between two waits: it is updated before the wait is computed. */
static void arm(struct timer_queue *queue)
{
	const struct timer *first = first_timer(queue);
	uv_timer_t *uv_timer = &queue->handles->timer;
	uint64_t now_ns = clock_now_ns();
	uint64_t wait_ms = 0;

	queue->armed_ns = first ? first->at_ns : UINT64_MAX;
	if (!first) {
		uv_timer_stop(uv_timer);
		return;
	}
	if (first->at_ns > now_ns)
		wait_ms = (first->at_ns - now_ns + NS_PER_MS - 1) / NS_PER_MS;
	uv_update_time(uv_timer->loop);
	uv_timer_start(uv_timer, expire_due, wait_ms, 0);
}

static void expire_due(uv_timer_t *uv_timer)
{
	struct timer_queue *queue = uv_timer->data;
	uint64_t now_ns = clock_now_ns();
	struct timer *timer;

	/* A timer that is set meanwhile expires in this loop as well, unless it is later than `now_ns`. */
	while ((timer = first_timer(queue)) && timer->at_ns <= now_ns) {
		timer_clear(timer);
		timer->expire(timer);
	}
	arm(queue);
}

/* Arms what another thread has set. */
static void before_wait(uv_prepare_t *prepare)
{
	struct timer_queue *queue = prepare->data;
	const struct timer *first = first_timer(queue);

	if (first && first->at_ns < queue->armed_ns)
		arm(queue);
}

int timer_queue_init(struct timer_queue *queue, struct uv_loop_s *loop)
{
	struct timer_handles *handles = calloc(1, sizeof(*handles));

	list_init(&queue->timers);
	queue->armed_ns = UINT64_MAX;
	queue->handles = handles;
	if (!handles)
		return -ENOMEM;
	handles->timer.data = handles->prepare.data = queue;
	uv_timer_init(loop, &handles->timer);
	uv_prepare_init(loop, &handles->prepare);
	uv_prepare_start(&handles->prepare, before_wait);
	uv_unref((uv_handle_t *)&handles->prepare);
	return 0;
}

static void free_handles(uv_handle_t *timer)
{
	free(container_of((uv_timer_t *)timer, struct timer_handles, timer));
}

void timer_queue_deinit(struct timer_queue *queue)
{
	if (!queue->handles)
		return;
	/* NB: the one that is closed first is done last. */
	uv_close((uv_handle_t *)&queue->handles->timer, free_handles);
	uv_close((uv_handle_t *)&queue->handles->prepare, NULL);
	queue->handles = NULL;
}

void timer_set(struct timer_queue *queue, struct timer *timer, uint64_t at_ns)
{
	struct fetcher *fetcher = queue->handles->timer.loop->data;
	struct link *place;

	timer_clear(timer);
	timer->at_ns = at_ns;
	/* Search from the end: most timers are deadlines of new reads, later than all others. */
	for (place = queue->timers.previous; place != &queue->timers; place = place->previous) {
		if (container_of(place, struct timer, link)->at_ns <= at_ns)
			break;
	}
	list_insert_after(place, &timer->link);
	/* Looking too early costs less than moving that at each timer. */
	if (at_ns >= queue->armed_ns)
		return;
	if (fetcher && fetcher->visited)
		fetcher->wanted = true;
	else
		arm(queue);
}

void timer_clear(struct timer *timer)
{
	list_remove(&timer->link);
}
