/* SPDX-License-Identifier: MIT */
/* What is to happen at a time, on the thread of an event loop. All times are CLOCK_MONOTONIC. */
#ifndef LAZY_AGENDA_H
#define LAZY_AGENDA_H

#include <stdbool.h>
#include <stdint.h>

#include "base/clock.h"
#include "base/list.h"

struct uv_loop_s;
struct uv_timer_s;

struct alarm {
	struct link link; /* in the agenda, by time */
	uint64_t at_ns;
	void (*ring)(struct alarm *alarm);
};

struct agenda {
	struct uv_timer_s *timer;
	struct link alarms; /* the next one first */
};

/* Returns 0 or a negative errno. */
int agenda_init(struct agenda *agenda, struct uv_loop_s *loop);
/* The loop is to be run once more. */
void agenda_deinit(struct agenda *agenda);

/* It rings once, not before `at_ns` and never inside this call, whatever it was set to before. */
void alarm_set(struct agenda *agenda, struct alarm *alarm, uint64_t at_ns);
/* Of one that is not set: nothing happens. */
void alarm_clear(struct alarm *alarm);

static inline bool alarm_is_set(const struct alarm *alarm)
{
	return link_is_in_list(&alarm->link);
}

#endif
