/* SPDX-License-Identifier: MIT */
/*
 * What units want of the cache: look-ups, which are waited for only so long, and the queue of units
 * that were delivered and wait to be put in. Both are done by workers of their own, because the
 * cache's disk, or another process that has locked the cache, may hold them for any time.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/fileio.h"
#include "base/relaxed.h"
#include "content/cache.h"
#include "content/layout.h"
#include "lazy/core.h"

enum {
	LOOK_UP_MS = 200, /* how long a unit waits for a look-up */
	RETRY_S = 10,	  /* after a content could not be opened */
	/*
	 * Units are put in together, so that a reader who waits for one unit after the other shares the
	 * CPUs with that once for many: when there are so many bytes, or after a while.
	 */
	PUT_BYTES = 1 << 20,
	PUT_MS = 20,
	FLUSH_S = 4, /* how long a fetcher that ends goes on putting units in */
};

/* It has memory of its own, because the unit may go on without it. */
struct look_up {
	struct pool_job job;
	struct core *core;
	struct unit *unit; /* NULL: the unit does not wait any more */
	struct source *source;
	uint64_t number;
	uint32_t length;
	uint8_t *data; /* malloc()ed if the cache has the unit, else NULL */
	int err;
};

static bool may_open(const struct source *source)
{
	return cache_object_of(source) || clock_now_ns() >= source->cache_retry_ns;
}

static void note_error(struct core *core, struct source *source, const uint64_t *unit, int err)
{
	const struct event event = { .name = "not_cached", .source = source, .unit = unit };

	relaxed_add(&core->counts.store_failures, 1);
	disk_note(core, DISK_OF_CACHE, err);
	if (!cache_object_of(source))
		source->cache_retry_ns = clock_now_ns() + RETRY_S * NS_PER_S;
	event_log(&event, "%s", strerror(-err));
}

static void work_look_up(struct pool_job *job)
{
	struct look_up *look_up = container_of(job, struct look_up, job);
	uint64_t offset = unit_place(look_up->source, look_up->number);
	struct cache_object *object;
	struct cache_lookup seen;
	int err;

	look_up->err = cache_object_open(look_up->core->cache, look_up->source, &object);
	if (look_up->err || !cache_lookup(object, look_up->number, look_up->number, &seen))
		return;
	look_up->data = malloc(look_up->length);
	if (!look_up->data)
		return;
	err = pread_full(cache_fd(object), look_up->data, look_up->length, offset);
	if (!err && cache_lookup_is_valid(object, &seen) &&
	    cache_verify(object, offset, look_up->data, look_up->length))
		return;
	free(look_up->data);
	look_up->data = NULL;
	/* It is fetched, and put into the cache again. */
	if (err || cache_lookup_is_valid(object, &seen))
		cache_drop(object, look_up->number);
}

/* The unit goes on with what the cache has (NULL: without). */
static void go_on(struct unit *unit, uint8_t *data)
{
	unit->look_up = NULL;
	if (data) {
		unit_reserve(unit, data);
		relaxed_add(&unit->core->counts.units_from_cache, 1);
		unit_verified(unit, true);
	} else if (unit->core->ending) {
		unit_set(unit, UNIT_WANTED);
	} else {
		unit_set(unit, UNIT_WANTED);
		unit_choose(unit, true);
	}
}

static void looked_up(struct pool_job *job)
{
	struct look_up *look_up = container_of(job, struct look_up, job);
	struct core *core = look_up->core;

	core->look_ups--;
	core->cache_is_late = false;
	if (look_up->err)
		note_error(core, look_up->source, NULL, look_up->err);
	if (look_up->unit) {
		go_on(look_up->unit, look_up->data);
		look_up->data = NULL;
	}
	free(look_up->data);
	free(look_up);
}

/* If the look-up has begun, it goes on, and others are begun once it has ended. */
void unit_look_up_is_late(struct unit *unit)
{
	struct core *core = unit->core;
	struct look_up *look_up = unit->look_up;

	if (worker_pool_cancel(&core->cache_workers, &look_up->job)) {
		core->look_ups--;
		free(look_up);
	} else {
		look_up->unit = NULL;
	}
	/* The end of one that has begun is what changes this back. */
	core->cache_is_late = core->look_ups;
	go_on(unit, NULL);
}

static void time_is_over(struct timer *timer)
{
	struct unit *unit = container_of(timer, struct unit, timer);

	completion_put(unit->core, &unit->news);
}

/* Whether the cache may have it and can be asked. */
static bool may_look_up(const struct unit *unit)
{
	const struct core *core = unit->core;
	const struct cache_object *object = cache_object_of(unit->source);

	return core->cache && !core->cache_is_late && may_open(unit->source) &&
	       (!object || cache_has(object, unit->number, unit->number));
}

void unit_want(struct unit *unit, bool first)
{
	if (may_look_up(unit))
		unit_queue(unit, &unit->core->lookup_queue, first);
	else
		unit_choose(unit, first);
}

void unit_look_up(struct unit *unit)
{
	struct core *core = unit->core;
	struct look_up *look_up = may_look_up(unit) ? calloc(1, sizeof(*look_up)) : NULL;

	list_remove(&unit->in_queue);
	if (!look_up) {
		unit_choose(unit, true);
		return;
	}
	look_up->core = core;
	look_up->unit = unit;
	look_up->source = unit->source;
	look_up->number = unit->number;
	look_up->length = unit->length;
	look_up->job.work = work_look_up;
	look_up->job.done = looked_up;
	core->look_ups++;
	unit->look_up = look_up;
	unit_reserve(unit, NULL);
	unit_set(unit, UNIT_LOOKING);
	unit->timer.expire = time_is_over;
	timer_set(&core->timers, &unit->timer, clock_now_ns() + LOOK_UP_MS * NS_PER_MS);
	core_submit(&core->cache_workers, &look_up->job);
}

static int put(struct unit *unit)
{
	struct cache_object *object;
	int err = cache_object_open(unit->core->cache, unit->source, &object);

	return err ?: cache_put(object, unit->number, unit->data, unit->length);
}

static void put_all(struct pool_job *job)
{
	const struct core *core = container_of(job, struct core, put_job);

	list_for_each (struct unit, unit, &core->storing, in_queue) {
		unit->check.err = put(unit);
	}
}

/* Takes it out of the queue of units that wait to be put in. */
static void leave(struct unit *unit)
{
	list_remove(&unit->in_queue);
	relaxed_add(&unit->core->counts.unstored_bytes, -(uint64_t)unit->length);
}

static void put_soon(struct core *core);

static void has_been_put(struct unit *unit)
{
	struct core *core = unit->core;

	leave(unit);
	core->storing_bytes -= unit->length;
	if (!unit->check.err) {
		disk_note(core, DISK_OF_CACHE, 0);
		relaxed_add(&core->counts.units_stored, 1);
		unit_set_fate(unit, FATE_STORED);
		unit_forget(unit);
	} else {
		note_error(core, unit->source, &unit->number, unit->check.err);
		unit->holds--;
		unit_keep(unit);
	}
}

static void have_been_put(struct pool_job *job)
{
	struct core *core = container_of(job, struct core, put_job);
	struct link *link;

	while ((link = list_first(&core->storing)))
		has_been_put(container_of(link, struct unit, in_queue));
	put_soon(core);
}

static void drop(struct unit *unit)
{
	leave(unit);
	relaxed_add(&unit->core->counts.store_drops, 1);
	unit_set_fate(unit, FATE_LOST);
	unit_forget(unit);
}

/* Moves units from the queue to those that the worker puts in. */
static void take_for_putting(struct core *core)
{
	struct link *link;

	while (core->storing_bytes < PUT_BYTES && (link = list_first(&core->unstored))) {
		struct unit *unit = container_of(link, struct unit, in_queue);

		if (core->ending && clock_now_ns() > core->flush_until_ns) {
			drop(unit);
		} else if (!may_open(unit->source)) {
			leave(unit);
			unit->holds--;
			unit_keep(unit);
		} else {
			list_remove(link);
			list_append(&core->storing, link);
			core->storing_bytes += unit->length;
			unit->check = (struct unit_check){};
		}
	}
}

/* Has the worker put queued units in the cache, if it has none. */
static void put_some(struct core *core)
{
	if (!list_is_empty(&core->storing))
		return;
	timer_clear(&core->put_timer);
	core->put_now = false;
	take_for_putting(core);
	if (list_is_empty(&core->storing))
		return;
	core->put_job.work = put_all;
	core->put_job.done = have_been_put;
	core_submit(&core->putters, &core->put_job);
}

static void put_is_due(struct timer *timer)
{
	put_some(container_of(timer, struct core, put_timer));
}

static void put_soon(struct core *core)
{
	core->put_timer.expire = put_is_due;
	if (core->put_now || core->ending ||
	    core->counts.unstored_bytes - core->storing_bytes >= PUT_BYTES)
		put_some(core);
	else if (!list_is_empty(&core->unstored) && !timer_is_set(&core->put_timer))
		timer_set(&core->timers, &core->put_timer, clock_now_ns() + PUT_MS * NS_PER_MS);
}

/* Queues the unit for the cache. Returns false when there is no cache for it. */
static bool store(struct unit *unit)
{
	struct core *core = unit->core;

	if (!core->cache || !may_open(unit->source))
		return false;
	unit->holds++;
	relaxed_add(&core->counts.unstored_bytes, unit->length);
	list_append(&core->unstored, &unit->in_queue);
	/* Somebody waits until it is there. */
	core->put_now |= !list_is_empty(&unit->subscriptions);
	put_soon(core);
	return true;
}

void unit_verified(struct unit *unit, bool found)
{
	unit_set(unit, UNIT_VERIFIED);
	missed_forget(unit);
	unit->fate = found ? FATE_FOUND : FATE_OPEN;
	unit_deliver(unit);
	if (!found && !unit->core->ending && !store(unit))
		unit_keep(unit);
}

/*
 * Drops a unit from that queue, because its memory is needed. `wanted`: if there is no other, one
 * that a prefetch wants in the cache. Returns false when there is none.
 */
static bool drop_one(struct core *core, bool wanted)
{
	struct link *first = list_first(&core->unstored);

	for (struct link *link = first; link && link != &core->unstored; link = link->next) {
		struct unit *unit = container_of(link, struct unit, in_queue);

		if (list_is_empty(&unit->subscriptions)) {
			drop(unit);
			return true;
		}
	}
	if (first && wanted)
		drop(container_of(first, struct unit, in_queue));
	return first && wanted;
}

/*
 * A prefetch drops no unit that waits for the cache: it would fetch that again without end.
 * Read-ahead drops as readers do, but none of a prefetch.
 */
static bool free_one(struct core *core, const struct unit *unit)
{
	struct link *oldest = list_first(&core->kept);

	if (!oldest)
		return unit->urgency > URGENCY_BACKGROUND &&
		       drop_one(core, unit->urgency == URGENCY_DEMAND);
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

void units_flush(struct core *core)
{
	core->flush_until_ns = clock_now_ns() + FLUSH_S * NS_PER_S;
	put_some(core);
}
