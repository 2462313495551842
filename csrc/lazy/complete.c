/* SPDX-License-Identifier: MIT */
#include "lazy/complete.h"

#include <errno.h>
#include <stdlib.h>

#include "base/relaxed.h"
#include "content/layout.h"
#include "content/map.h"

enum {
	BEGIN_S = 1,	/* after the start, so that a mount comes first */
	LOOK_S = 5,	/* how often it looks for more that the map names, */
	RECOUNT_S = 60, /* and for what the cache has lost */
	FULL_S = 20,	/* how often it looks for room */
	PAUSE_MAX_S = 60,
	PAGE_S = 2, /* how long a prefetch takes, about */
	PAGE_MOST_BYTES = 64 << 20,
	PAGE_MOST_UNITS = 1024,
	TRIAL_UNITS = 4, /* after a page that gave nothing */
	QUIET_IDLE_MS = 1000,
	QUIET_MS = 10,
	AT_ONCE_IDLE = 16,
	PLACE = 2, /* of the job: others are left to readers */
};

static void note(struct complete *complete, enum complete_state state, const char *why)
{
	relaxed_store(&complete->why, why);
	relaxed_store(&complete->state, state);
}

static void look_later(struct complete *complete, unsigned seconds)
{
	timer_set(&complete->core->timers, &complete->timer, clock_now_ns() + seconds * NS_PER_S);
}

/*
 * Finds the units of the first mapping that ends behind `*from`, and moves that to its end. `*at`
 * is where the first of them begins in the virtual data, if all of it were mapped. Returns false
 * when there is no mapping left.
 */
static bool next_range(const struct complete *complete, uint64_t *from, uint64_t *at,
		       struct prefetch_extent *range)
{
	const struct mapping *mapping = map_next(complete->map, *from);
	uint64_t start, last;

	while (mapping && mapping->source->computed)
		mapping = map_next(complete->map, mapping->offset + mapping->length);
	if (!mapping)
		return false;
	*at = *from > mapping->offset ? *from : mapping->offset;
	*from = mapping->offset + mapping->length;
	start = mapping->source_offset + *at - mapping->offset;
	last = unit_of(mapping->source, mapping->source_offset + mapping->length - 1);
	range->source = mapping->source;
	range->first = unit_of(mapping->source, start);
	range->count = last + 1 - range->first;
	*at -= start - unit_extent(mapping->source, range->first).offset;
	return true;
}

/* Opens the content; returns 0, or a negative errno, which is what its units fail with. */
static int open_content(struct complete *complete, struct source *source)
{
	struct cache_object *object;

	return cache_object_open(complete->core->cache, source, &object);
}

static void count(struct complete *complete)
{
	uint64_t units = 0, done_units = 0, bytes = 0, done_bytes = 0, from = 0, at;
	struct prefetch_extent range;

	while (next_range(complete, &from, &at, &range)) {
		open_content(complete, range.source);
		for (uint64_t i = range.first; i < range.first + range.count; i++) {
			uint32_t length = unit_extent(range.source, i).length;
			bool cached = cache_has_unit(range.source, i);

			units++;
			bytes += length;
			done_units += cached;
			done_bytes += cached ? length : 0;
		}
	}
	relaxed_store(&complete->units, units);
	relaxed_store(&complete->bytes, bytes);
	relaxed_store(&complete->done_units, done_units);
	relaxed_store(&complete->done_bytes, done_bytes);
}

/* How many units, and bytes, the next prefetch may have. */
static size_t page_units(const struct complete *complete)
{
	return complete->skipped ? TRIAL_UNITS : PAGE_MOST_UNITS;
}

static uint64_t page_bytes(const struct complete *complete)
{
	uint64_t rate = complete->options.bytes_per_s;

	return rate && rate < PAGE_MOST_BYTES / PAGE_S ? rate * PAGE_S : PAGE_MOST_BYTES;
}

/* Returns whether the page is full. */
static bool add(struct complete *complete, struct source *source, uint64_t unit)
{
	struct prefetch_plan *plan = &complete->plan;

	plan->extents[plan->count++] = (struct prefetch_extent){ source, unit, 1 };
	complete->plan_bytes += cache_room_of(unit_extent(source, unit).length);
	return plan->count == page_units(complete) || complete->plan_bytes >= page_bytes(complete);
}

/* Collects the next units that the cache lacks. */
static void collect(struct complete *complete)
{
	struct prefetch_extent range;
	uint64_t at;

	while (next_range(complete, &complete->next, &at, &range)) {
		uint64_t start = unit_extent(range.source, range.first).offset;

		if (range.source == complete->skipped || open_content(complete, range.source)) {
			complete->lacking++;
			continue;
		}
		for (uint64_t i = range.first; i < range.first + range.count; i++) {
			if (cache_has_unit(range.source, i) || !add(complete, range.source, i))
				continue;
			/* The next page begins behind this unit. */
			if (i + 1 < range.first + range.count)
				complete->next = at + unit_end_offset(range.source, i) - start;
			return;
		}
	}
}

/* Finds how much has room as it is, and leaves the rest out. */
static int find_room(struct complete *complete)
{
	struct prefetch_plan *plan = &complete->plan;
	struct cache_ranges ranges = {};
	int err = 0;

	for (size_t i = 0; i < plan->count && !err; i++) {
		const struct prefetch_extent *extent = &plan->extents[i];

		err = cache_ranges_add(&ranges, cache_object_of(extent->source), extent->first,
				       extent->first + 1);
	}
	if (!err)
		err = cache_room_for(complete->core->cache, &ranges, false, &plan->room);
	cache_ranges_free(&ranges);
	while (!err && plan->count && complete->plan_bytes > plan->room.bytes) {
		const struct prefetch_extent *last = &plan->extents[--plan->count];

		complete->plan_bytes -=
			cache_room_of(unit_extent(last->source, last->first).length);
	}
	complete->is_full = !plan->count;
	return err;
}

static void look(struct pool_job *job)
{
	struct complete *complete = container_of(job, struct complete, job);
	bool idle = !complete->options.bytes_per_s;

	complete->plan = (struct prefetch_plan){
		.extents = calloc(PAGE_MOST_UNITS, sizeof(struct prefetch_extent)),
		.bytes_per_s = complete->options.bytes_per_s,
		.at_once = idle ? AT_ONCE_IDLE : PREFETCH_AT_ONCE_DEFAULT,
		.quiet_ns = (idle ? QUIET_IDLE_MS : QUIET_MS) * NS_PER_MS,
		.keeps_pace = true,
	};
	complete->plan_bytes = 0;
	complete->is_full = false;
	complete->err = complete->plan.extents ? 0 : -ENOMEM;
	if (complete->err)
		return;
	if (!complete->next) {
		complete->mappings = map_count(complete->map);
		complete->lacking = 0;
		complete->skipped = NULL;
		count(complete);
	}
	collect(complete);
	if (complete->plan.count)
		complete->err = find_room(complete);
	else
		count(complete);
}

/* Begins a new pass, which counts all again, after a pause. */
static void pause_after(struct complete *complete, enum complete_state state, const char *why,
			unsigned seconds)
{
	complete->next = 0;
	note(complete, state, why);
	look_later(complete, seconds);
}

/* Waits longer each time that nothing came since the last time. */
static void retry(struct complete *complete, const char *why)
{
	if (complete->got || !complete->pause_s)
		complete->pause_s = 1;
	else if (complete->pause_s < PAUSE_MAX_S)
		complete->pause_s = 2 * complete->pause_s < PAUSE_MAX_S ? 2 * complete->pause_s :
									  PAUSE_MAX_S;
	complete->got = 0;
	pause_after(complete, COMPLETE_RETRYING, why, complete->pause_s);
}

static void looked(struct pool_job *job)
{
	struct complete *complete = container_of(job, struct complete, job);
	struct prefetch_plan *plan = &complete->plan;
	bool begins = !complete->core->ending && !complete->err && plan->count;
	uint64_t id;

	complete->looking = false;
	if (begins) {
		complete->last = plan->extents[plan->count - 1].source;
		note(complete, COMPLETE_FETCHING, NULL);
		complete->err = prefetch_start(&complete->run, plan, &id);
		if (!complete->err)
			return;
	}
	free(plan->extents);
	if (complete->core->ending)
		return;
	if (complete->err)
		retry(complete, "the cache does not answer, or memory is short");
	else if (complete->is_full)
		pause_after(complete, COMPLETE_FULL,
			    "the cache has no room for more without evicting", FULL_S);
	else if (complete->lacking)
		retry(complete, "units could not be fetched, or not be cached");
	else if (complete->done_units < complete->units)
		pause_after(complete, COMPLETE_FETCHING, NULL, 1); /* the map has grown */
	else
		pause_after(complete, COMPLETE_DONE, NULL, LOOK_S);
}

static void begin_look(struct complete *complete)
{
	if (complete->core->ending || complete->looking)
		return;
	if (prefetch_is_running(complete->client, 0)) {
		note(complete, COMPLETE_PAUSED, NULL);
		look_later(complete, 1);
		return;
	}
	complete->looking = true;
	complete->job = (struct pool_job){ .work = look, .done = looked, .place = PLACE };
	core_submit(&complete->core->cache_workers, &complete->job);
}

/* Its prefetch has ended. */
static void take_over(struct core *core, struct completion *completion)
{
	struct complete *complete = container_of(completion, struct complete, over);
	struct prefetch *run = &complete->run;
	uint64_t got = run->cached_units + run->fetched_units;
	uint64_t lack = run->failed_units + run->uncached_units;

	relaxed_add(&complete->done_units, got);
	relaxed_add(&complete->done_bytes, run->fetched_bytes);
	relaxed_add(&complete->fetched_bytes, run->fetched_bytes);
	relaxed_add(&complete->failed_units, run->failed_units);
	if (core->ending || relaxed_load(&core->abandoned))
		return;
	complete->got += got;
	complete->lacking += lack;
	complete->skipped = lack && !got ? complete->last : NULL;
	if (run->uncached_units && !got) {
		retry(complete, "the cache takes nothing (see its log)");
		return;
	}
	/* What the rate still owes delays the next one. */
	timer_set(&core->timers, &complete->timer, run->next_ns);
}

static void timer_expired(struct timer *timer)
{
	struct complete *complete = container_of(timer, struct complete, timer);

	completion_put(complete->core, &complete->begin);
}

static void take_begin(struct core *core, struct completion *completion)
{
	struct complete *complete = container_of(completion, struct complete, begin);
	bool is_done = relaxed_load(&complete->state) == COMPLETE_DONE;

	if (is_done && map_count(complete->map) == complete->mappings &&
	    ++complete->looks < RECOUNT_S / LOOK_S) {
		look_later(complete, LOOK_S);
		return;
	}
	complete->looks = 0;
	begin_look(complete);
}

static void take_start(struct core *core, struct completion *completion)
{
	struct complete *complete = container_of(completion, struct complete, begin);

	complete->begin.take = take_begin;
	look_later(complete, BEGIN_S);
}

void complete_begin(struct complete *complete, const struct map *map,
		    const struct complete_options *options)
{
	complete->map = map;
	complete->options = *options;
	note(complete, COMPLETE_FETCHING, NULL);
	complete->begin.take = take_start;
	core_send(complete->core, &complete->begin);
}

void complete_abandon(struct complete *complete)
{
	timer_clear(&complete->timer);
	prefetch_abandon(&complete->run);
}

json_t *complete_json(const struct complete *complete)
{
	static const char *const states[] = {
		[COMPLETE_FETCHING] = "fetching", [COMPLETE_PAUSED] = "paused",
		[COMPLETE_RETRYING] = "retrying", [COMPLETE_FULL] = "full",
		[COMPLETE_DONE] = "done",
	};
	enum complete_state state = relaxed_load(&complete->state);

	if (state == COMPLETE_OFF)
		return json_null();
	if (state == COMPLETE_FETCHING && prefetch_is_running(&complete->run, 0) &&
	    relaxed_load(&complete->run.waits))
		state = COMPLETE_PAUSED;
	return json_pack("{s:s, s:s?, s:I, s:I, s:I, s:I, s:I, s:I, s:I}", "state", states[state],
			 "why", relaxed_load(&complete->why), "bytes_per_s",
			 (json_int_t)complete->options.bytes_per_s, "units",
			 (json_int_t)relaxed_load(&complete->units), "done_units",
			 (json_int_t)relaxed_load(&complete->done_units), "bytes",
			 (json_int_t)relaxed_load(&complete->bytes), "done_bytes",
			 (json_int_t)relaxed_load(&complete->done_bytes), "fetched_bytes",
			 (json_int_t)relaxed_load(&complete->fetched_bytes), "failed_units",
			 (json_int_t)relaxed_load(&complete->failed_units));
}

void complete_init(struct complete *complete, struct core *core, const struct prefetch *client)
{
	complete->core = core;
	complete->client = client;
	complete->timer.expire = timer_expired;
	complete->over.take = take_over;
	prefetch_init(&complete->run, core);
	complete->run.over = &complete->over;
}

void complete_deinit(struct complete *complete)
{
	prefetch_deinit(&complete->run);
}
