/* SPDX-License-Identifier: MIT */
/* Subscriptions begin and end, which changes where their units wait, and what runs they have. */
#include <errno.h>

#include "lazy/core.h"
#include "lazy/run.h"

/* Where its urgency has it wait now. */
static void queue_again(struct unit *unit)
{
	if (unit->state == UNIT_WANTED && link_is_in_list(&unit->in_queue))
		unit_queue(unit, unit->host, false);
}

static void raise_urgency(struct unit *unit, enum urgency urgency)
{
	struct core *core = unit->core;

	if (unit->state == UNIT_VERIFIED && urgency == URGENCY_DEMAND && unit->fate == FATE_LOST &&
	    link_is_in_list(&unit->in_queue)) {
		list_remove(&unit->in_queue); /* used last */
		list_append(&core->kept, &unit->in_queue);
	}
	if (unit->urgency >= urgency)
		return;
	if (urgency == URGENCY_DEMAND && unit_is_busy(unit->state))
		core->prefetching--;
	unit->urgency = urgency;
	if (urgency == URGENCY_DEMAND && unit->run)
		run_is_demanded(unit);
	queue_again(unit);
}

static int join(struct core *core, struct unit *unit, struct subscription *subscription)
{
	if (!unit)
		return -ENOMEM;
	if (subscription->deadline_ns && unit->run)
		run_joined(unit, subscription->deadline_ns);
	subscription->unit = unit;
	list_append(&unit->subscriptions, &subscription->link);
	raise_urgency(unit, subscription->ops->urgency);
	if (unit->state == UNIT_VERIFIED ||
	    (unit->state == UNIT_WANTED && !link_is_in_list(&unit->in_queue)))
		completion_put(core, &unit->news);
	return 0;
}

int subscribe(struct core *core, struct subscription *subscription, struct source *source,
	      uint64_t number)
{
	return join(core, unit_get(core, source, number), subscription);
}

void subscription_end(struct subscription *subscription)
{
	struct unit *unit = subscription->unit;

	if (!link_is_in_list(&subscription->link))
		return;
	list_remove(&subscription->link);
	if (unit_urgency(unit) < unit->urgency)
		queue_again(unit);
	if (unit->state == UNIT_ASKED && list_is_empty(&unit->subscriptions))
		run_trim(unit->run);
	unit_let_go(unit);
}

static void ahead_is_right(struct subscription *subscription, const struct unit *unit)
{
}

static void ahead_failed(struct subscription *subscription, int err)
{
}

static const struct subscription_ops ahead_ops = {
	.right = ahead_is_right,
	.failed = ahead_failed,
	.urgency = URGENCY_AHEAD,
};

void unit_read_ahead(struct core *core, struct source *source, uint64_t number)
{
	struct unit *unit = unit_get(core, source, number);

	if (!unit || unit->state == UNIT_VERIFIED || link_is_in_list(&unit->ahead.link))
		return;
	unit->ahead.ops = &ahead_ops;
	join(core, unit, &unit->ahead);
}
