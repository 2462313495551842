/* SPDX-License-Identifier: MIT */
#include "lazy/agenda.h"

#include <errno.h>
#include <stdlib.h>
#include <uv.h>

static struct alarm *first_alarm(const struct agenda *agenda)
{
	struct link *first = list_first(&agenda->alarms);

	return first ? container_of(first, struct alarm, link) : NULL;
}

static void ring_due(uv_timer_t *timer);

/* The loop's own clock stands still between two waits: what is to be waited for is counted anew. */
static void aim(struct agenda *agenda)
{
	const struct alarm *first = first_alarm(agenda);
	uint64_t now_ns = clock_now_ns();
	uint64_t wait_ms = 0;

	if (!first) {
		uv_timer_stop(agenda->timer);
		return;
	}
	if (first->at_ns > now_ns)
		wait_ms = (first->at_ns - now_ns + NS_PER_MS - 1) / NS_PER_MS;
	uv_update_time(agenda->timer->loop);
	uv_timer_start(agenda->timer, ring_due, wait_ms, 0);
}

static void ring_due(uv_timer_t *timer)
{
	struct agenda *agenda = timer->data;
	uint64_t now_ns = clock_now_ns();
	struct alarm *alarm;

	/* What is set meanwhile for now, is later than `now_ns`, or rings as well. */
	while ((alarm = first_alarm(agenda)) && alarm->at_ns <= now_ns) {
		alarm_clear(alarm);
		alarm->ring(alarm);
	}
	aim(agenda);
}

int agenda_init(struct agenda *agenda, struct uv_loop_s *loop)
{
	int err;

	list_init(&agenda->alarms);
	agenda->timer = calloc(1, sizeof(*agenda->timer));
	if (!agenda->timer)
		return -ENOMEM;
	agenda->timer->data = agenda;
	err = uv_timer_init(loop, agenda->timer);
	if (err) {
		free(agenda->timer);
		agenda->timer = NULL;
	}
	return err;
}

static void free_timer(uv_handle_t *timer)
{
	free(timer);
}

void agenda_deinit(struct agenda *agenda)
{
	if (agenda->timer)
		uv_close((uv_handle_t *)agenda->timer, free_timer);
	agenda->timer = NULL;
}

void alarm_set(struct agenda *agenda, struct alarm *alarm, uint64_t at_ns)
{
	struct link *place;

	alarm_clear(alarm);
	alarm->at_ns = at_ns;
	/* Most are later than all there are: the deadline of a read that has just come. */
	for (place = agenda->alarms.previous; place != &agenda->alarms; place = place->previous) {
		if (container_of(place, struct alarm, link)->at_ns <= at_ns)
			break;
	}
	list_insert_after(place, &alarm->link);
	if (place == &agenda->alarms)
		aim(agenda);
}

void alarm_clear(struct alarm *alarm)
{
	list_remove(&alarm->link);
}
