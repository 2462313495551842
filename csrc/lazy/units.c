/* SPDX-License-Identifier: MIT */
/* The units that are wanted or kept: their states, their places in queues, and their memory. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/relaxed.h"
#include "content/layout.h"
#include "lazy/core.h"

enum {
	SPARE_LEAST_BYTES = 32 << 10, /* what is less, the heap has at hand */
	SPARE_MOST_BYTES = 2 << 20,
	SPARE_MS = 2000, /* then all of it is given back */
};

static struct link *bucket_of(struct core *core, const struct source *source, uint64_t number)
{
	uint64_t hash = ((uintptr_t)source / sizeof(void *) + number) * 0x9e3779b97f4a7c15ull;

	return &core->buckets[hash >> 52]; /* the upper 12 bits */
}

bool unit_is_busy(enum unit_state state)
{
	return state == UNIT_LOOKING || state == UNIT_FETCHING || state == UNIT_CHECKING;
}

void unit_set(struct unit *unit, enum unit_state state)
{
	struct core *core = unit->core;
	int busy = (int)unit_is_busy(state) - (int)unit_is_busy(unit->state);
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
	if (!unit_is_busy(state))
		unit_let_go(unit);
}

void unit_let_go(struct unit *unit)
{
	if (!list_is_empty(&unit->subscriptions))
		return;
	if (!link_is_in_list(&unit->in_unused))
		list_append(&unit->core->unused, &unit->in_unused);
}

/* Ends its subscriptions, but for those that go on waiting. */
static void end_subscriptions(struct unit *unit, int err)
{
	struct link all, *link;

	/* NB: a callback may end any other subscription, also of this list. */
	list_init(&all);
	while ((link = list_first(&unit->subscriptions))) {
		list_remove(link);
		list_append(&all, link);
	}
	while ((link = list_first(&all))) {
		struct subscription *subscription = container_of(link, struct subscription, link);
		bool waits = err ? subscription->deadline_ns == FETCHER_NO_DEADLINE :
				   subscription->ops->until_stored && unit->fate == FATE_OPEN;

		list_remove(link);
		if (waits)
			list_append(&unit->subscriptions, link);
		else if (err)
			subscription->ops->failed(subscription, err);
		else
			subscription->ops->right(subscription, unit);
	}
}

void unit_deliver(struct unit *unit)
{
	end_subscriptions(unit, 0);
	unit_let_go(unit);
}

void unit_forget_attempts(struct unit *unit)
{
	unit->out = 0;
	memset(unit->tries, 0, sizeof(unit->tries));
	memset(unit->wrong, 0, sizeof(unit->wrong));
	unit->rounds = 0;
	unit->waited = false;
	unit->later_ns = 0;
}

bool unit_fail(struct unit *unit, int err)
{
	unit_forget_attempts(unit);
	end_subscriptions(unit, err);
	if (!list_is_empty(&unit->subscriptions))
		return true;
	unit_set(unit, UNIT_WANTED);
	return false;
}

struct unit *unit_find(struct core *core, const struct source *source, uint64_t number)
{
	const struct link *bucket = bucket_of(core, source, number);

	list_for_each (struct unit, unit, bucket, in_bucket) {
		if (unit->source == source && unit->number == number)
			return unit;
	}
	return NULL;
}

enum urgency unit_urgency(const struct unit *unit)
{
	enum urgency urgency = URGENCY_BACKGROUND;

	list_for_each (const struct subscription, subscription, &unit->subscriptions, link) {
		if (subscription->ops->urgency > urgency)
			urgency = subscription->ops->urgency;
	}
	return urgency;
}

static struct unit *new_unit(struct core *core, struct source *source, uint64_t number)
{
	struct unit *unit = calloc(1, sizeof(*unit));

	if (!unit)
		return NULL;
	unit->core = core;
	unit->source = source;
	unit->number = number;
	unit->length = unit_extent(source, number).length;
	unit->news.take = core->take_unit;
	list_init(&unit->subscriptions);
	list_append(bucket_of(core, source, number), &unit->in_bucket);
	core->units++;
	relaxed_add(&core->counts.units_queued, 1);
	return unit;
}

struct unit *unit_get(struct core *core, struct source *source, uint64_t number)
{
	return unit_find(core, source, number) ?: new_unit(core, source, number);
}

struct subscription *unit_reader(const struct unit *unit)
{
	list_for_each (struct subscription, subscription, &unit->subscriptions, link) {
		if (subscription->deadline_ns)
			return subscription;
	}
	return NULL;
}

uint64_t unit_last_deadline_ns(const struct unit *unit)
{
	uint64_t last_ns = 0;

	list_for_each (const struct subscription, subscription, &unit->subscriptions, link) {
		if (subscription->deadline_ns > last_ns)
			last_ns = subscription->deadline_ns;
	}
	return last_ns;
}

/* Memory that units have had. The link is at its beginning. */
struct spare {
	struct link link;
	uint32_t length;
};

void units_free_spare(struct core *core)
{
	struct link *link;

	while ((link = list_first(&core->spare))) {
		list_remove(link);
		free(container_of(link, struct spare, link));
	}
	core->spare_bytes = 0;
}

static void on_spare_timer(struct timer *timer)
{
	units_free_spare(container_of(timer, struct core, spare_timer));
}

/* Keeps some of it for the next ones, as each would cost the faults of its pages. */
static void keep_spare(struct core *core, uint8_t *data, uint32_t length)
{
	struct spare *spare = (struct spare *)(void *)data;

	if (!data || length < SPARE_LEAST_BYTES || core->ending ||
	    core->spare_bytes + length > SPARE_MOST_BYTES) {
		free(data);
		return;
	}
	*spare = (struct spare){ .length = length };
	list_insert_after(&core->spare, &spare->link);
	core->spare_bytes += length;
	core->spare_timer.expire = on_spare_timer;
	if (!timer_is_set(&core->spare_timer))
		timer_set(&core->timers, &core->spare_timer, clock_now_ns() + SPARE_MS * NS_PER_MS);
}

uint8_t *unit_new_data(const struct unit *unit)
{
	struct core *core = unit->core;

	list_for_each (struct spare, spare, &core->spare, link) {
		if (spare->length != unit->length)
			continue;
		list_remove(&spare->link);
		core->spare_bytes -= unit->length;
		return (uint8_t *)spare;
	}
	return malloc(unit->length);
}

void unit_free_data(struct unit *unit)
{
	keep_spare(unit->core, unit->data, unit->length);
	unit->data = NULL;
}

static void release(struct unit *unit)
{
	if (unit->reserved)
		relaxed_add(&unit->core->counts.buffer_bytes, -(uint64_t)unit->length);
	unit->reserved = false;
	unit_free_data(unit);
}

void unit_queue(struct unit *unit, struct host *host, bool first)
{
	struct link *waiting;

	release(unit);
	if (unit->state != UNIT_WANTED)
		unit_set(unit, UNIT_WANTED);
	list_remove(&unit->in_queue);
	unit->host = host;
	unit->urgency = unit_urgency(unit); /* a reader may have left */
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
	uint8_t *data = unit_new_data(unit);

	if (data)
		unit_reserve(unit, data);
	else
		unit_has_no_memory(unit);
	return data;
}

void unit_set_fate(struct unit *unit, enum unit_fate fate)
{
	unit->fate = fate;
	unit_deliver(unit);
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
	unit_deliver(unit); /* to subscribers that came just now */
	unit->holds--;
	release(unit);
	unit_set(unit, UNIT_WANTED);
}
