/* SPDX-License-Identifier: MIT */
/* The step: takes what has news, frees what nobody needs, and begins what may begin. */
#include <stdlib.h>
#include <sys/eventfd.h>

#include "base/relaxed.h"
#include "lazy/core.h"
#include "lazy/run.h"

enum {
	ROUNDS_MAX = 8,
	TAKEN_MAX = 256,
};

void completion_put(struct core *core, struct completion *completion)
{
	if (!link_is_in_list(&completion->link))
		list_append(&core->completions, &completion->link);
}

/*
 * NB: uv_async_send() would make the woken thread wait until it returns, and spin while the sender
 * is preempted on the same CPU.
 */
void core_send(struct core *core, struct completion *completion)
{
	if (message_queue_put(&core->messages, &completion->message))
		eventfd_write(core->wake_fd, 1);
}

void core_receive(struct core *core)
{
	struct message *message = message_queue_take(&core->messages);

	while (message) {
		struct completion *completion = container_of(message, struct completion, message);

		message = message->next;
		completion->link = (struct link){};
		completion_put(core, completion);
	}
}

static void job_ended(struct core *core, struct completion *completion)
{
	struct pool_job *job = container_of(completion, struct pool_job, ended);

	(void)core;
	job->done(job);
}

void core_submit(struct core *core, struct pool_job *job)
{
	job->ended.take = job_ended;
	worker_pool_submit(&core->workers, job);
}

void core_cache_submit(struct core *core, struct pool_job *job)
{
	job->ended.take = job_ended;
	worker_pool_submit(&core->cache_workers, job);
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
	free(unit->data);
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

uint64_t core_slots(const struct core *core, const struct source *source)
{
	uint64_t most = core->options.max_buffer_bytes / source->unit_bytes;

	return most < core->options.max_transfers ? most : core->options.max_transfers;
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

bool core_step(struct core *core)
{
	for (unsigned round = 0; round < ROUNDS_MAX; round++) {
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
