/* SPDX-License-Identifier: MIT */
/* A queue of timers on the thread of an event loop. All times are CLOCK_MONOTONIC. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "base/clock.h"
#include "base/list.h"

struct timer_handles;
struct uv_loop_s;

struct timer {
	struct link link; /* in the queue, by time */
	uint64_t at_ns;
	void (*expire)(struct timer *timer);
};

struct timer_queue {
	struct timer_handles *handles; /* of libuv */
	struct link timers;	       /* the next one first */
	uint64_t armed_ns;	       /* when the loop looks at them; UINT64_MAX: not at all */
};

/* Returns 0 or a negative errno. */
int timer_queue_init(struct timer_queue *queue, struct uv_loop_s *loop);
/* Run the loop once more afterwards, so that libuv closes its handles. */
void timer_queue_deinit(struct timer_queue *queue);

/*
 * Calls timer->expire() once, at `at_ns` or later and never inside this call. A timer that is set
 * already is moved.
 */
void timer_set(struct timer_queue *queue, struct timer *timer, uint64_t at_ns);
/* Does nothing when the timer is not set. */
void timer_clear(struct timer *timer);

static inline bool timer_is_set(const struct timer *timer)
{
	return link_is_in_list(&timer->link);
}
