/* SPDX-License-Identifier: MIT */
/*
 * The step: takes what has news, frees what nobody needs, and begins what may begin. It calls all
 * other files of the core, and none of them calls it.
 */
#include <stdlib.h>

#include "base/relaxed.h"
#include "lazy/core.h"
#include "lazy/run.h"

enum {
	ROUNDS_MAX = 8,
	TAKEN_MAX = 256,
};

/* Takes its news, which are of its state. */
static void take_unit(struct core *core, struct completion *completion)
{
	struct unit *unit = container_of(completion, struct unit, news);

	switch (unit->state) {
	case UNIT_WANTED:
		if (!list_is_empty(&unit->subscriptions))
			unit_want(unit, false);
		break;
	case UNIT_RESTING:
		unit_set(unit, UNIT_WANTED);
		unit_want(unit, true);
		break;
	case UNIT_LOOKING:
		unit_look_up_is_late(unit);
		break;
	case UNIT_FETCHING:
		if (unit_verify(unit))
			unit_checked(unit);
		break;
	case UNIT_ASKED:
		break;
	case UNIT_CHECKING:
		unit_checked(unit);
		break;
	case UNIT_VERIFIED:
		unit_deliver(unit);
		break;
	}
}

/* Nobody wants the rest of it, or it is over. */
static void take_run(struct core *core, struct completion *completion)
{
	struct run *run = container_of(completion, struct run, news);

	if (run->is_over)
		attempt_over(run);
	else
		run_cancel(run);
}

void core_init(struct core *core)
{
	core->take_unit = take_unit;
	core->take_run = take_run;
	list_init(&core->completions);
	list_init(&core->unused);
	for (unsigned i = 0; i < URGENCIES; i++)
		list_init(&core->ready[i]);
	for (unsigned i = 0; i < UNIT_BUCKETS; i++)
		list_init(&core->buckets[i]);
	list_init(&core->kept);
	list_init(&core->unstored);
	list_init(&core->storing);
	list_init(&core->spare);
	list_init(&core->paused);
	list_init(&core->unstarted);
	list_init(&core->reads);
	host_init(&core->lookup_queue);
	host_init(&core->no_host);
}

void core_deinit(struct core *core)
{
	units_free_spare(core);
	hosts_free(core->hosts, core->latencies);
}

static void take_some(struct core *core)
{
	struct link *link;

	for (unsigned taken = 0; taken < TAKEN_MAX && (link = list_first(&core->completions));
	     taken++) {
		struct completion *completion = container_of(link, struct completion, link);

		list_remove(link);
		completion->take(core, completion);
	}
}

static bool is_needed(const struct unit *unit)
{
	return !list_is_empty(&unit->subscriptions) || unit->holds || unit->state == UNIT_LOOKING ||
	       unit->state == UNIT_ASKED || unit->state == UNIT_FETCHING ||
	       unit->state == UNIT_CHECKING;
}

static void unit_free(struct unit *unit)
{
	unit_set(unit, UNIT_WANTED); /* takes it out of all queues */
	relaxed_add(&unit->core->counts.units_queued, -1);
	if (unit->reserved)
		relaxed_add(&unit->core->counts.buffer_bytes, -(uint64_t)unit->length);
	unit->core->units--;
	list_remove(&unit->in_unused);
	list_remove(&unit->in_bucket);
	free(unit->identity);
	unit_free_data(unit);
	free(unit);
}

static void free_unused(struct core *core)
{
	struct link *link;

	while ((link = list_first(&core->unused))) {
		struct unit *unit = container_of(link, struct unit, in_unused);

		list_remove(link);
		if (!is_needed(unit))
			unit_free(unit);
	}
}

/* Returns false when nothing of this urgency may begin now. */
static bool may_begin(const struct core *core, enum urgency urgency)
{
	unsigned most = core->options.max_transfers;

	return core->busy < most && (urgency == URGENCY_DEMAND || core->prefetching < most / 2);
}

/* The first unit that waits for a host, or NULL when that may have no more fetches. */
static struct unit *next_of(const struct core *core, const struct host *host, enum urgency urgency)
{
	struct link *first = list_first(&host->waiting[urgency]);
	struct unit *unit = first ? container_of(first, struct unit, in_queue) : NULL;

	if (unit && host_is_full(host, urgency, core_slots(core, unit->source)))
		return NULL;
	return unit;
}

/*
 * Hosts of this urgency by turns. Those that may have no more leave the list; what changes that puts
 * them back. Returns false when nothing else may begin either.
 */
static bool start_runs(struct core *core, enum urgency urgency)
{
	struct link *link;

	while ((link = list_first(&core->ready[urgency]))) {
		struct host *host = container_of(link, struct host, in_ready[urgency]);
		struct unit *unit = next_of(core, host, urgency);

		if (unit && (!may_begin(core, urgency) || !unit_make_room(unit)))
			return false;
		list_remove(link);
		if (!unit)
			continue;
		list_append(&core->ready[urgency], link);
		if (host == &core->lookup_queue)
			unit_look_up(unit);
		else
			unit_begin(unit);
	}
	return true;
}

/* What readers' threads have begun, but could not hand to their kinds. */
static void start_begun(struct core *core)
{
	struct link *link;

	while ((link = list_first(&core->unstarted))) {
		struct run *run = container_of(link, struct run, unstarted);

		list_remove(link);
		run->mirror->ops->start(run);
	}
}

bool core_step(struct core *core)
{
	for (unsigned round = 0; round < ROUNDS_MAX; round++) {
		start_begun(core);
		take_some(core);
		free_unused(core);
		runs_resume(core);
		for (unsigned urgency = URGENCIES; urgency && start_runs(core, urgency - 1);)
			urgency--;
		if (list_is_empty(&core->completions) && list_is_empty(&core->unused))
			return false;
	}
	return true;
}

bool core_visit(struct core *core)
{
	take_some(core);
	start_runs(core, URGENCY_DEMAND);
	free_unused(core);
	return !list_is_empty(&core->completions) || !list_is_empty(&core->unstarted);
}

void core_stop(struct core *core)
{
	struct link *link;

	while ((link = list_first(&core->kept)))
		unit_forget(container_of(link, struct unit, in_queue));
	for (unsigned i = 0; i < UNIT_BUCKETS; i++) {
		for (link = core->buckets[i].next; link != &core->buckets[i]; link = link->next) {
			struct unit *unit = container_of(link, struct unit, in_bucket);

			subscription_end(&unit->ahead);
			if (unit->state == UNIT_FETCHING && unit->run)
				run_cancel(unit->run);
		}
	}
	units_flush(core);
}
