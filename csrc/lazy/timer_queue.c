/* SPDX-License-Identifier: MIT */
#include "lazy/timer_queue.h"

#include <errno.h>
#include <stdlib.h>
#include <uv.h>

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
	uint64_t now_ns = clock_now_ns();
	uint64_t wait_ms = 0;

	if (!first) {
		uv_timer_stop(queue->uv_timer);
		return;
	}
	if (first->at_ns > now_ns)
		wait_ms = (first->at_ns - now_ns + NS_PER_MS - 1) / NS_PER_MS;
	uv_update_time(queue->uv_timer->loop);
	uv_timer_start(queue->uv_timer, expire_due, wait_ms, 0);
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

int timer_queue_init(struct timer_queue *queue, struct uv_loop_s *loop)
{
	int err;

	list_init(&queue->timers);
	queue->uv_timer = calloc(1, sizeof(*queue->uv_timer));
	if (!queue->uv_timer)
		return -ENOMEM;
	queue->uv_timer->data = queue;
	err = uv_timer_init(loop, queue->uv_timer);
	if (err) {
		free(queue->uv_timer);
		queue->uv_timer = NULL;
	}
	return err;
}

static void free_uv_timer(uv_handle_t *uv_timer)
{
	free(uv_timer);
}

void timer_queue_deinit(struct timer_queue *queue)
{
	if (queue->uv_timer)
		uv_close((uv_handle_t *)queue->uv_timer, free_uv_timer);
	queue->uv_timer = NULL;
}

void timer_set(struct timer_queue *queue, struct timer *timer, uint64_t at_ns)
{
	struct link *place;

	timer_clear(timer);
	timer->at_ns = at_ns;
	/* Search from the end: most timers are deadlines of new reads, later than all others. */
	for (place = queue->timers.previous; place != &queue->timers; place = place->previous) {
		if (container_of(place, struct timer, link)->at_ns <= at_ns)
			break;
	}
	list_insert_after(place, &timer->link);
	if (place == &queue->timers)
		arm(queue);
}

void timer_clear(struct timer *timer)
{
	list_remove(&timer->link);
}
