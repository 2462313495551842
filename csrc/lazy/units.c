/* SPDX-License-Identifier: MIT */
/* The units that are wanted or kept, their subscriptions, states and memory. */
#include <errno.h>
#include <stdlib.h>

#include "base/relaxed.h"
#include "lazy/core.h"
#include "lazy/layout.h"
#include "lazy/run.h"

static struct link *bucket_of(struct core *core, const struct source *source, uint64_t number)
{
	uint64_t hash = ((uintptr_t)source / sizeof(void *) + number) * 0x9e3779b97f4a7c15ull;

	return &core->buckets[hash >> 54]; /* the upper 10 bits */
}

static bool is_busy(enum unit_state state)
{
	return state == UNIT_LOOKING || state == UNIT_FETCHING || state == UNIT_CHECKING;
}

void core_init(struct core *core)
{
	list_init(&core->completions);
	list_init(&core->unused);
	for (unsigned i = 0; i < URGENCIES; i++)
		list_init(&core->ready[i]);
	for (unsigned i = 0; i < UNIT_BUCKETS; i++)
		list_init(&core->buckets[i]);
	list_init(&core->kept);
	list_init(&core->unstored);
	list_init(&core->paused);
	list_init(&core->reads);
	host_init(&core->lookup_queue);
	host_init(&core->no_host);
}

void core_deinit(struct core *core)
{
	hosts_free(core->hosts, core->latencies);
}

void unit_set(struct unit *unit, enum unit_state state)
{
	struct core *core = unit->core;
	int busy = (int)is_busy(state) - (int)is_busy(unit->state);
	int queued = (int)(state == UNIT_WANTED) - (int)(unit->state == UNIT_WANTED);

	core->busy += (unsigned)busy;
	if (unit->urgency != URGENCY_DEMAND)
		core->prefetching += (unsigned)busy;
	if (unit->state == UNIT_ASKED)
		core->asked_bytes -= unit->length;
	if (state == UNIT_ASKED)
		core->asked_bytes += unit->length;
	list_remove(&unit->news.link);
	list_remove(&unit->in_queue);
	timer_clear(&unit->timer);
	unit->state = state;
	relaxed_store(&core->counts.units_in_flight, core->busy);
	relaxed_add(&core->counts.units_queued, (uint64_t)queued);
	if (!is_busy(state))
		unit_let_go(unit);
}

void unit_let_go(struct unit *unit)
{
	if (!list_is_empty(&unit->subscriptions))
		return;
	if (!link_is_in_list(&unit->in_unused))
		list_append(&unit->core->unused, &unit->in_unused);
}

static void end_subscription(struct link *link, const struct unit *unit, int err)
{
	struct subscription *subscription = container_of(link, struct subscription, link);

	list_remove(link);
	if (err)
		subscription->ops->failed(subscription, err);
	else
		subscription->ops->right(subscription, unit);
}

/* NB: a callback may end any other subscription, also of this list. */
static void move_all(struct link *from, struct link *to)
{
	struct link *link;

	list_init(to);
	while ((link = list_first(from))) {
		list_remove(link);
		list_append(to, link);
	}
}

static void deliver(struct unit *unit)
{
	struct link all, *link;

	move_all(&unit->subscriptions, &all);
	while ((link = list_first(&all))) {
		const struct subscription *subscription =
			container_of(link, struct subscription, link);

		if (!subscription->ops->until_stored || unit->fate != FATE_OPEN) {
			end_subscription(link, unit, 0);
			continue;
		}
		list_remove(link);
		list_append(&unit->subscriptions, link);
	}
	unit_let_go(unit);
}

bool unit_fail(struct unit *unit, int err)
{
	struct link all, *link;

	unit_forget_attempts(unit);
	move_all(&unit->subscriptions, &all);
	while ((link = list_first(&all))) {
		const struct subscription *subscription =
			container_of(link, struct subscription, link);

		if (subscription->deadline_ns != FETCHER_NO_DEADLINE) {
			end_subscription(link, unit, err);
			continue;
		}
		list_remove(link);
		list_append(&unit->subscriptions, link);
	}
	if (!list_is_empty(&unit->subscriptions))
		return true;
	unit_set(unit, UNIT_WANTED);
	return false;
}

/* Takes its news, which are of its state. */
static void take_news(struct core *core, struct completion *completion)
{
	struct unit *unit = container_of(completion, struct unit, news);

	(void)core;
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
		unit_verify(unit);
		break;
	case UNIT_ASKED:
	case UNIT_CHECKING:
		break;
	case UNIT_VERIFIED:
		deliver(unit);
		break;
	}
}

struct unit *unit_find(struct core *core, const struct source *source, uint64_t number)
{
	const struct link *bucket = bucket_of(core, source, number);

	for (struct link *link = bucket->next; link != bucket; link = link->next) {
		struct unit *unit = container_of(link, struct unit, in_bucket);

		if (unit->source == source && unit->number == number)
			return unit;
	}
	return NULL;
}

static void ahead_is_right(struct subscription *subscription, const struct unit *unit)
{
	(void)subscription;
	(void)unit;
}

static void ahead_failed(struct subscription *subscription, int err)
{
	(void)subscription;
	(void)err;
}

static const struct subscription_ops ahead_ops = {
	.right = ahead_is_right,
	.failed = ahead_failed,
	.urgency = URGENCY_AHEAD,
};

static struct unit *new_unit(struct core *core, struct source *source, uint64_t number)
{
	struct unit *unit = calloc(1, sizeof(*unit));

	if (!unit)
		return NULL;
	unit->core = core;
	unit->source = source;
	unit->number = number;
	unit->length = unit_extent(source, number).length;
	unit->ahead.ops = &ahead_ops;
	unit->news.take = take_news;
	list_init(&unit->subscriptions);
	list_append(bucket_of(core, source, number), &unit->in_bucket);
	core->units++;
	relaxed_add(&core->counts.units_queued, 1);
	return unit;
}

/* Where its urgency has it wait now. */
static void queue_again(struct unit *unit)
{
	if (unit->state == UNIT_WANTED && link_is_in_list(&unit->in_queue))
		unit_queue(unit, unit->host, false);
}

static enum urgency urgency_of(const struct unit *unit)
{
	enum urgency urgency = URGENCY_BACKGROUND;

	for (struct link *link = unit->subscriptions.next; link != &unit->subscriptions;
	     link = link->next) {
		const struct subscription *subscription =
			container_of(link, struct subscription, link);

		if (subscription->ops->urgency > urgency)
			urgency = subscription->ops->urgency;
	}
	return urgency;
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
	if (urgency == URGENCY_DEMAND && is_busy(unit->state))
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
	struct unit *unit = unit_find(core, source, number) ?: new_unit(core, source, number);

	return join(core, unit, subscription);
}

void subscription_end(struct subscription *subscription)
{
	struct unit *unit = subscription->unit;

	if (!link_is_in_list(&subscription->link))
		return;
	list_remove(&subscription->link);
	if (urgency_of(unit) < unit->urgency)
		queue_again(unit);
	if (unit->state == UNIT_ASKED && list_is_empty(&unit->subscriptions))
		run_trim(unit->run);
	unit_let_go(unit);
}

void unit_read_ahead(struct core *core, struct source *source, uint64_t number)
{
	struct unit *unit = unit_find(core, source, number) ?: new_unit(core, source, number);

	if (!unit || unit->state == UNIT_VERIFIED || link_is_in_list(&unit->ahead.link))
		return;
	join(core, unit, &unit->ahead);
}

struct subscription *unit_reader(const struct unit *unit)
{
	for (struct link *link = unit->subscriptions.next; link != &unit->subscriptions;
	     link = link->next) {
		struct subscription *subscription = container_of(link, struct subscription, link);

		if (subscription->deadline_ns)
			return subscription;
	}
	return NULL;
}

uint64_t unit_last_deadline_ns(const struct unit *unit)
{
	uint64_t last_ns = 0;

	for (struct link *link = unit->subscriptions.next; link != &unit->subscriptions;
	     link = link->next) {
		const struct subscription *subscription =
			container_of(link, struct subscription, link);

		if (subscription->deadline_ns > last_ns)
			last_ns = subscription->deadline_ns;
	}
	return last_ns;
}

static void release(struct unit *unit)
{
	if (unit->reserved)
		relaxed_add(&unit->core->counts.buffer_bytes, -(uint64_t)unit->length);
	unit->reserved = false;
	free(unit->data);
	unit->data = NULL;
}

void unit_want(struct unit *unit, bool first)
{
	if (unit_may_look_up(unit))
		unit_queue(unit, &unit->core->lookup_queue, first);
	else
		unit_choose(unit, first);
}

void unit_queue(struct unit *unit, struct host *host, bool first)
{
	struct link *waiting;

	release(unit);
	if (unit->state != UNIT_WANTED)
		unit_set(unit, UNIT_WANTED);
	list_remove(&unit->in_queue);
	unit->host = host;
	unit->urgency = urgency_of(unit); /* a reader may have left */
	waiting = &host->waiting[unit->urgency];
	list_insert_after(first ? waiting : waiting->previous, &unit->in_queue);
	host_is_ready(unit->core, host);
}

void host_is_ready(struct core *core, struct host *host)
{
	for (unsigned i = 0; i < URGENCIES; i++) {
		if (!list_is_empty(&host->waiting[i]) && !link_is_in_list(&host->in_ready[i]))
			list_append(&core->ready[i], &host->in_ready[i]);
	}
}

static void rest_is_over(struct timer *timer)
{
	struct unit *unit = container_of(timer, struct unit, timer);

	completion_put(unit->core, &unit->news);
}

void unit_rest(struct unit *unit, uint64_t at_ns)
{
	release(unit);
	unit_set(unit, UNIT_RESTING);
	unit->timer.expire = rest_is_over;
	timer_set(&unit->core->timers, &unit->timer, at_ns);
}

void unit_reserve(struct unit *unit, uint8_t *data)
{
	release(unit);
	unit->data = data;
	unit->reserved = true;
	relaxed_add(&unit->core->counts.buffer_bytes, unit->length);
}

/* Readers with time left wait until there may be some. */
void unit_has_no_memory(struct unit *unit)
{
	relaxed_add(&unit->core->counts.local_failures, 1);
	if (unit_fail(unit, -EIO))
		unit_rest(unit, clock_now_ns() + NS_PER_S);
}

bool unit_allocate(struct unit *unit)
{
	uint8_t *data = malloc(unit->length);

	if (data)
		unit_reserve(unit, data);
	else
		unit_has_no_memory(unit);
	return data;
}

/*
 * A prefetch drops no unit that is to be put in the cache, or there would be no end to it.
 * Read-ahead drops as readers do, but none of a prefetch.
 */
static bool free_one(struct core *core, const struct unit *unit)
{
	struct link *oldest = list_first(&core->kept);

	if (!oldest)
		return unit->urgency > URGENCY_BACKGROUND &&
		       units_drop_one(core, unit->urgency == URGENCY_DEMAND);
	unit_forget(container_of(oldest, struct unit, in_queue));
	return true;
}

/*
 * Prefetched units may take half of the memory. One unit always fits. What a worker is putting in
 * the cache, perhaps for minutes, takes nothing of that away.
 */
bool unit_make_room(struct unit *unit)
{
	struct core *core = unit->core;
	const uint64_t *used = &core->counts.buffer_bytes;
	bool demanded = unit->urgency == URGENCY_DEMAND;
	uint64_t most = core->options.max_buffer_bytes / (demanded ? 1 : 2);
	uint64_t aside = core->storing_bytes;

	while (*used - aside + unit->length > most && free_one(core, unit))
		;
	return *used == aside || *used - aside + unit->length <= most;
}

void unit_verified(struct unit *unit, bool found)
{
	unit_set(unit, UNIT_VERIFIED);
	missed_forget(unit);
	unit->fate = found ? FATE_FOUND : FATE_OPEN;
	deliver(unit);
	if (!found && !unit->core->ending && !unit_store(unit))
		unit_keep(unit);
}

void unit_set_fate(struct unit *unit, enum unit_fate fate)
{
	unit->fate = fate;
	deliver(unit);
}

void unit_keep(struct unit *unit)
{
	if (!unit->core->ending) {
		unit->holds++;
		list_append(&unit->core->kept, &unit->in_queue);
	}
	unit_set_fate(unit, FATE_LOST);
}

void unit_forget(struct unit *unit)
{
	deliver(unit); /* to whoever has come just now */
	unit->holds--;
	release(unit);
	unit_set(unit, UNIT_WANTED);
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
