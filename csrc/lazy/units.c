/* SPDX-License-Identifier: MIT */
/*
 * The units in flight: they are found by source and number, admitted as there are slots, and kept
 * in memory while there is room.
 */
#include <errno.h>
#include <stdlib.h>

#include "base/relaxed.h"
#include "lazy/layout.h"
#include "lazy/unit.h"

static struct link *bucket_of(struct fetcher *fetcher, const struct source *source, uint64_t number)
{
	uint64_t hash = ((uintptr_t)source / sizeof(void *) + number) * 0x9e3779b97f4a7c15ull;

	return &fetcher->buckets[hash >> 54]; /* the upper 10 bits */
}

static bool is_busy(enum unit_state state)
{
	return state >= UNIT_LOOKING && state <= UNIT_CHECKING;
}

static bool waits_for_cache(enum unit_state state)
{
	return state == UNIT_UNSTORED || state == UNIT_STORING;
}

void unit_set_state(struct unit *unit, enum unit_state state)
{
	struct fetcher *fetcher = unit->fetcher;
	int busy = (int)is_busy(state) - (int)is_busy(unit->state);
	int queued = (int)(state == UNIT_QUEUED) - (int)(unit->state == UNIT_QUEUED);
	int unstored = (int)waits_for_cache(state) - (int)waits_for_cache(unit->state);

	fetcher->busy += busy;
	if (!unit->demanded)
		fetcher->prefetching += busy;
	if (unit->state == UNIT_STORING) {
		fetcher->storing--;
		fetcher->storing_bytes -= unit->length;
	}
	if (state == UNIT_STORING) {
		fetcher->storing++;
		fetcher->storing_bytes += unit->length;
	}
	relaxed_add(&fetcher->counts.unstored_bytes, (uint64_t)unstored * unit->length);
	unit->state = state;
	relaxed_store(&fetcher->counts.units_in_flight, fetcher->busy);
	relaxed_add(&fetcher->counts.units_queued, queued);
}

struct unit *unit_find(struct fetcher *fetcher, const struct source *source, uint64_t number)
{
	const struct link *bucket = bucket_of(fetcher, source, number);

	for (struct link *link = bucket->next; link != bucket; link = link->next) {
		struct unit *unit = container_of(link, struct unit, in_bucket);

		if (unit->source == source && unit->number == number)
			return unit;
	}
	return NULL;
}

static void demand(struct unit *unit)
{
	struct fetcher *fetcher = unit->fetcher;

	if (unit->state == UNIT_KEPT) {
		list_remove(&unit->in_queue);
		list_append(&fetcher->kept, &unit->in_queue);
	}
	if (unit->demanded)
		return;
	if (is_busy(unit->state))
		fetcher->prefetching--;
	unit_demanded(unit);
	unit->demanded = true;
	if (unit->state == UNIT_QUEUED) {
		list_remove(&unit->in_queue);
		list_append(&fetcher->demand, &unit->in_queue);
	}
}

struct unit *unit_get(struct fetcher *fetcher, struct source *source, uint64_t number,
		      bool demanded)
{
	struct unit *unit = unit_find(fetcher, source, number);

	if (unit) {
		if (demanded)
			demand(unit);
		return unit;
	}
	unit = calloc(1, sizeof(*unit));
	if (!unit)
		return NULL;
	unit->fetcher = fetcher;
	unit->source = source;
	unit->number = number;
	unit->length = unit_extent(source, number).length;
	unit->demanded = demanded;
	list_init(&unit->waiters);
	list_append(bucket_of(fetcher, source, number), &unit->in_bucket);
	list_append(demanded ? &fetcher->demand : &fetcher->prefetch, &unit->in_queue);
	unit_set_state(unit, UNIT_QUEUED);
	return unit;
}

static void release(struct unit *unit)
{
	if (unit->data)
		relaxed_add(&unit->fetcher->counts.buffer_bytes, -(uint64_t)unit->length);
	free(unit->data);
	unit->data = NULL;
}

static void unit_free(struct unit *unit)
{
	if (unit->prefetch_id)
		prefetch_unit_over(unit);
	unit_set_state(unit, UNIT_NEW);
	timer_clear(&unit->timer);
	list_remove(&unit->in_bucket);
	list_remove(&unit->in_queue);
	release(unit);
	free(unit);
}

/*
 * Frees a unit that nobody waits for. A prefetch drops no unit that is to be put in the cache, or
 * there would be no end to it. Read-ahead drops as readers do, but none of a prefetch.
 */
static bool free_one(struct fetcher *fetcher, const struct unit *unit)
{
	struct link *oldest = list_first(&fetcher->kept);
	struct unit *victim = NULL;

	if (oldest)
		victim = container_of(oldest, struct unit, in_queue);
	else if (unit->demanded || !prefetch_wants(unit))
		victim = unit_to_drop(fetcher, unit->demanded);
	if (!victim)
		return false;
	if (victim->state == UNIT_UNSTORED)
		relaxed_add(&fetcher->counts.store_drops, 1);
	unit_free(victim);
	return true;
}

/*
 * Prefetched units may take half of the memory. One unit always fits. What a worker is putting in
 * the cache, perhaps for minutes, takes nothing of that away.
 */
static bool make_room(struct fetcher *fetcher, const struct unit *unit)
{
	const uint64_t *used = &fetcher->counts.buffer_bytes;
	uint64_t most = fetcher->options.max_buffer_bytes / (unit->demanded ? 1 : 2);
	uint64_t aside = fetcher->storing_bytes;

	while (*used - aside + unit->length > most && free_one(fetcher, unit))
		;
	return *used == aside || *used - aside + unit->length <= most;
}

/* Returns the first unit in a queue whose host can take one more fetch. */
static struct unit *first_for_any_host(const struct link *queue)
{
	for (struct link *link = queue->next; link != queue; link = link->next) {
		struct unit *unit = container_of(link, struct unit, in_queue);

		if (!unit_host_is_full(unit))
			return unit;
	}
	return NULL;
}

/* Returns NULL when none waits, or no more may be in flight. */
static struct unit *next_waiting(const struct fetcher *fetcher)
{
	struct unit *unit;

	if (fetcher->busy >= fetcher->options.max_transfers)
		return NULL;
	unit = first_for_any_host(&fetcher->demand);
	if (!unit && fetcher->prefetching < fetcher->options.max_transfers / 2)
		unit = first_for_any_host(&fetcher->prefetch);
	return unit;
}

void unit_queue(struct unit *unit)
{
	struct fetcher *fetcher = unit->fetcher;

	release(unit);
	list_insert_after(unit->demanded ? &fetcher->demand : &fetcher->prefetch, &unit->in_queue);
	unit_set_state(unit, UNIT_QUEUED);
	units_admit(fetcher);
}

static void queue_again(struct timer *timer)
{
	unit_queue(container_of(timer, struct unit, timer));
}

void unit_rest(struct unit *unit, uint64_t at_ns)
{
	/* Nobody waits for it, and its timer would not expire any more. */
	if (unit->fetcher->ending) {
		unit_end(unit);
		return;
	}
	release(unit);
	unit_set_state(unit, UNIT_RESTING);
	unit->timer.expire = queue_again;
	timer_set(&unit->fetcher->timers, &unit->timer, at_ns);
	units_admit(unit->fetcher);
}

/* Memory is short: readers with time left wait until there may be some. */
static void put_off(struct unit *unit)
{
	relaxed_add(&unit->fetcher->counts.local_failures, 1);
	if (unit_fail_waiters(unit, -EIO))
		unit_rest(unit, clock_now_ns() + NS_PER_S);
	else
		unit_free(unit);
}

static void start(struct unit *unit)
{
	list_remove(&unit->in_queue);
	unit->data = malloc(unit->length);
	if (!unit->data) {
		put_off(unit);
		return;
	}
	relaxed_add(&unit->fetcher->counts.buffer_bytes, unit->length);
	if (!unit_look_up(unit))
		unit_fetch(unit);
}

void units_admit(struct fetcher *fetcher)
{
	struct unit *unit;

	/* NB: a unit that starts may end at once and call this again; do not recurse. */
	if (fetcher->admitting)
		return;
	fetcher->admitting = true;
	while ((unit = next_waiting(fetcher)) && make_room(fetcher, unit))
		start(unit);
	fetcher->admitting = false;
}

void unit_left_alone(struct unit *unit)
{
	if (unit->state == UNIT_QUEUED || unit->state == UNIT_RESTING)
		unit_free(unit);
}

void unit_ready(struct unit *unit, bool from_mirror)
{
	struct fetcher *fetcher = unit->fetcher;

	unit_set_state(unit, UNIT_STORING);
	unit_deliver(unit);
	if (!from_mirror || fetcher->ending) {
		unit_end(unit); /* the cache has it */
		return;
	}
	if (unit_store(unit))
		units_admit(fetcher); /* its place, and its memory if needed, are free */
	else
		unit_keep(unit);
}

void unit_keep(struct unit *unit)
{
	struct fetcher *fetcher = unit->fetcher;

	if (fetcher->ending) {
		unit_end(unit);
		return;
	}
	unit_set_state(unit, UNIT_KEPT);
	if (unit->prefetch_id)
		prefetch_unit_over(unit);
	list_append(&fetcher->kept, &unit->in_queue);
	units_admit(fetcher);
}

void unit_end(struct unit *unit)
{
	struct fetcher *fetcher = unit->fetcher;

	unit_free(unit);
	units_admit(fetcher);
}

static void free_all(struct link *queue)
{
	struct link *link;

	while ((link = list_first(queue)))
		unit_free(container_of(link, struct unit, in_queue));
}

void units_stop(struct fetcher *fetcher)
{
	free_all(&fetcher->demand);
	free_all(&fetcher->prefetch);
	free_all(&fetcher->kept);
	units_flush(fetcher);
	for (unsigned i = 0; i < UNIT_BUCKETS; i++) {
		struct link *bucket = &fetcher->buckets[i], *link, *next;

		for (link = bucket->next; link != bucket; link = next) {
			struct unit *unit = container_of(link, struct unit, in_bucket);
			const struct mirror *mirror = unit->fetch.mirror;

			next = link->next;
			if (unit->state == UNIT_RESTING)
				unit_free(unit);
			else if (unit->state == UNIT_FETCHING && mirror->ops->cancel)
				mirror->ops->cancel(&unit->fetch);
		}
	}
}
