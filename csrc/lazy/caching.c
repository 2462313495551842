/* SPDX-License-Identifier: MIT */
/*
 * What units want of the cache: look-ups, which are waited for only so long, and the queue of units
 * that were delivered and are to be put in. Both are done by workers of their own, because the
 * cache's disk, or another process that has locked the cache, may hold them for any time.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/fileio.h"
#include "base/relaxed.h"
#include "lazy/cache.h"
#include "lazy/layout.h"
#include "lazy/unit.h"

enum {
	LOOK_UP_MS = 200, /* how long a unit waits for a look-up */
	RETRY_S = 10,	  /* after a content could not be opened */
	/* one that is being put in, and the next one, so that the worker need not wait */
	STORING_MAX = 2,
	PUT_PLACE = 1, /* of jobs that put units in: one at a time */
	FLUSH_S = 4,   /* how long a fetcher that ends goes on putting units in */
};

/* It has memory of its own, because the unit may go on without it. */
struct look_up {
	struct pool_job job;
	struct fetcher *fetcher;
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

static void note_error(struct fetcher *fetcher, const struct event *event, struct source *source,
		       int err)
{
	relaxed_add(&fetcher->counts.store_failures, 1);
	disk_note(fetcher, DISK_OF_CACHE, err);
	if (!cache_object_of(source))
		source->cache_retry_ns = clock_now_ns() + RETRY_S * NS_PER_S;
	event_log(fetcher, event, "%s", strerror(-err));
}

static void work_look_up(struct pool_job *job)
{
	struct look_up *look_up = container_of(job, struct look_up, job);
	uint64_t offset = unit_place(look_up->source, look_up->number);
	struct cache_object *object;
	struct cache_lookup seen;
	int err;

	look_up->err = cache_object_open(look_up->fetcher->cache, look_up->source, &object);
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

static void looked_up(struct pool_job *job)
{
	struct look_up *look_up = container_of(job, struct look_up, job);
	struct fetcher *fetcher = look_up->fetcher;
	struct unit *unit = look_up->unit;

	fetcher->look_ups--;
	fetcher->cache_is_late = false;
	if (look_up->err)
		note_error(fetcher,
			   &(struct event){ .name = "not_cached", .source = look_up->source },
			   look_up->source, look_up->err);
	if (unit) {
		timer_clear(&unit->timer);
		unit->look_up = NULL;
		unit->check.found = look_up->data;
	}
	if (unit && look_up->data) {
		free(unit->data);
		unit->data = look_up->data;
		look_up->data = NULL;
		relaxed_add(&fetcher->counts.units_from_cache, 1);
		unit_ready(unit, false);
	} else if (unit && fetcher->ending) {
		unit_end(unit);
	} else if (unit) {
		unit_fetch(unit);
	}
	free(look_up->data);
	free(look_up);
}

/* If the look-up has begun, it goes on, and others are begun once it has ended. */
static void look_up_is_late(struct timer *timer)
{
	struct unit *unit = container_of(timer, struct unit, timer);
	struct fetcher *fetcher = unit->fetcher;
	struct look_up *look_up = unit->look_up;

	unit->look_up = NULL;
	if (worker_pool_cancel(&fetcher->cache_workers, &look_up->job)) {
		fetcher->look_ups--;
		free(look_up);
	} else {
		look_up->unit = NULL;
	}
	/* The end of one that has begun is what changes this back. */
	fetcher->cache_is_late = fetcher->look_ups;
	if (fetcher->ending)
		unit_end(unit);
	else
		unit_fetch(unit);
}

bool unit_look_up(struct unit *unit)
{
	struct fetcher *fetcher = unit->fetcher;
	const struct cache_object *object = cache_object_of(unit->source);
	struct look_up *look_up;

	if (!fetcher->cache || fetcher->cache_is_late || !may_open(unit->source) ||
	    (object && !cache_has(object, unit->number, unit->number)))
		return false;
	look_up = calloc(1, sizeof(*look_up));
	if (!look_up)
		return false;
	look_up->fetcher = fetcher;
	look_up->unit = unit;
	look_up->source = unit->source;
	look_up->number = unit->number;
	look_up->length = unit->length;
	look_up->job.work = work_look_up;
	look_up->job.done = looked_up;
	fetcher->look_ups++;
	unit->check = (struct unit_check){};
	unit->look_up = look_up;
	unit_set_state(unit, UNIT_LOOKING);
	unit->timer.expire = look_up_is_late;
	timer_set(&fetcher->timers, &unit->timer, clock_now_ns() + LOOK_UP_MS * NS_PER_MS);
	fetcher_cache_submit(fetcher, &look_up->job);
	return true;
}

static void put(struct pool_job *job)
{
	struct unit *unit = container_of(job, struct unit, job);
	struct cache_object *object;
	int err = cache_object_open(unit->fetcher->cache, unit->source, &object);

	unit->check.err = err ?: cache_put(object, unit->number, unit->data, unit->length);
}

static void has_been_put(struct pool_job *job)
{
	struct unit *unit = container_of(job, struct unit, job);
	struct fetcher *fetcher = unit->fetcher;

	if (!unit->check.err) {
		disk_note(fetcher, DISK_OF_CACHE, 0);
		relaxed_add(&fetcher->counts.units_stored, 1);
		unit_end(unit);
	} else {
		note_error(fetcher, &(struct event){ .name = "not_cached", .unit = unit },
			   unit->source, unit->check.err);
		unit_keep(unit);
	}
	units_put_some(fetcher);
	units_admit(fetcher); /* the next one's memory may have been set aside only now */
}

static void drop(struct unit *unit)
{
	relaxed_add(&unit->fetcher->counts.store_drops, 1);
	unit_end(unit);
}

void units_put_some(struct fetcher *fetcher)
{
	struct link *link;

	while (fetcher->storing < STORING_MAX && (link = list_first(&fetcher->unstored))) {
		struct unit *unit = container_of(link, struct unit, in_queue);

		if (fetcher->ending && clock_now_ns() > fetcher->flush_until_ns) {
			drop(unit);
			continue;
		}
		list_remove(link);
		if (!may_open(unit->source)) {
			unit_keep(unit);
			continue;
		}
		unit_set_state(unit, UNIT_STORING);
		unit->check = (struct unit_check){};
		unit->job.work = put;
		unit->job.done = has_been_put;
		unit->job.place = PUT_PLACE;
		fetcher_cache_submit(fetcher, &unit->job);
	}
}

bool unit_store(struct unit *unit)
{
	struct fetcher *fetcher = unit->fetcher;

	if (!fetcher->cache || !may_open(unit->source))
		return false;
	unit_set_state(unit, UNIT_UNSTORED);
	list_append(&fetcher->unstored, &unit->in_queue);
	units_put_some(fetcher);
	return true;
}

struct unit *unit_to_drop(struct fetcher *fetcher, bool prefetched)
{
	struct link *first = list_first(&fetcher->unstored);

	for (struct link *link = first; link && link != &fetcher->unstored; link = link->next) {
		struct unit *unit = container_of(link, struct unit, in_queue);

		if (!prefetch_wants(unit))
			return unit;
	}
	return first && prefetched ? container_of(first, struct unit, in_queue) : NULL;
}

void units_flush(struct fetcher *fetcher)
{
	fetcher->flush_until_ns = clock_now_ns() + FLUSH_S * NS_PER_S;
}
