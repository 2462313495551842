/* SPDX-License-Identifier: MIT */
#include "lazy/prefetch.h"

#include <errno.h>
#include <stdlib.h>

#include "base/relaxed.h"
#include "lazy/cache.h"
#include "lazy/layout.h"
#include "lazy/unit.h"

enum {
	/* How much of the rate may be caught up after a pause. */
	BURST_MS = 50,
	/* How often it checks whether a client still wants it when nothing else happens. */
	TICK_MS = 500,
	/* Cache lookups in one go, before others have their turn on the fetcher's thread. */
	LOOKS_AT_ONCE = 4096,
	/* The share of the slots that it uses while readers wait. */
	YIELDING_SHARE = 8,
	ROUNDS_MAX = 2,
	UNCACHED_MAX = 64,
};

static enum prefetch_state state_of(const struct prefetch_run *run)
{
	return __atomic_load_n(&run->state, __ATOMIC_ACQUIRE);
}

static void end(struct prefetch_run *run, enum prefetch_state state, const char *why)
{
	timer_clear(&run->timer);
	free(run->plan.extents);
	run->plan.extents = NULL;
	relaxed_store(&run->why, why);
	relaxed_store(&run->ended_ns, clock_now_ns());
	__atomic_store_n(&run->state, state, __ATOMIC_RELEASE);
}

/* Drops queued units that only the prefetch has asked for. */
static void drop_queued(struct fetcher *fetcher, uint64_t id)
{
	struct link *link = fetcher->prefetch.next;

	while (link != &fetcher->prefetch) {
		struct unit *unit = container_of(link, struct unit, in_queue);

		link = link->next;
		if (unit->prefetch_id == id)
			unit_left_alone(unit);
	}
}

static bool is_cached(const struct source *source, uint64_t unit)
{
	const struct cache_object *object = cache_object_of(source);

	return object && cache_has(object, unit, unit);
}

static uint64_t cost_ns(const struct prefetch_run *run, uint32_t bytes)
{
	uint64_t rate = run->plan.bytes_per_s;

	return rate ? bytes * NS_PER_S / rate : 0;
}

static void pay(struct prefetch_run *run, uint32_t bytes, uint64_t now_ns)
{
	uint64_t earliest_ns = now_ns - BURST_MS * NS_PER_MS;

	if (run->next_ns < earliest_ns)
		run->next_ns = earliest_ns;
	run->next_ns += cost_ns(run, bytes);
}

static unsigned most_under_way(const struct fetcher *fetcher)
{
	unsigned most = fetcher->run.plan.at_once;

	if (!fetcher->counts.reads_waiting)
		return most;
	return most > YIELDING_SHARE ? most / YIELDING_SHARE : 1;
}

/* Asks for the next unit. */
static void want(struct fetcher *fetcher, struct source *source, uint64_t number, uint64_t now_ns)
{
	struct prefetch_run *run = &fetcher->run;
	uint64_t takes = cache_room_of(unit_extent(source, number).length);
	struct unit *unit = unit_find(fetcher, source, number);

	if (run->plan.room.bytes < takes && (!unit || unit->prefetch_id != run->id)) {
		relaxed_add(&run->uncached_units, 1);
		return;
	}
	unit = unit_get(fetcher, source, number, false);
	if (!unit) {
		relaxed_add(&run->failed_units, 1);
	} else if (unit->prefetch_id == run->id) {
		relaxed_add(&run->cached_units, 1); /* the list has it twice */
	} else if (unit->state == UNIT_KEPT) {
		relaxed_add(&run->uncached_units, 1);
	} else {
		unit->prefetch_id = run->id;
		run->plan.room.bytes -= takes;
		run->under_way++;
		pay(run, unit->length, now_ns);
	}
}

static void advance(struct prefetch_run *run)
{
	if (++run->in_extent < run->plan.extents[run->extent].count)
		return;
	run->in_extent = 0;
	run->extent++;
}

/* Returns when to call it again. */
static uint64_t begin_some(struct fetcher *fetcher, uint64_t now_ns)
{
	struct prefetch_run *run = &fetcher->run;
	unsigned looks = 0;

	while (run->extent < run->plan.count && run->under_way < most_under_way(fetcher)) {
		const struct prefetch_extent *extent = &run->plan.extents[run->extent];
		uint64_t number = extent->first + run->in_extent;

		if (looks++ == LOOKS_AT_ONCE)
			return now_ns;
		if (is_cached(extent->source, number))
			relaxed_add(&run->cached_units, 1);
		else if (run->next_ns > now_ns)
			return run->next_ns;
		else
			want(fetcher, extent->source, number, now_ns);
		advance(run);
	}
	return UINT64_MAX;
}

static void step(struct fetcher *fetcher)
{
	struct prefetch_run *run = &fetcher->run;
	uint64_t now_ns = clock_now_ns(), at_ns, id;

	if (state_of(run) != PREFETCH_RUNNING)
		return;
	id = relaxed_load(&run->id);
	if (fetcher->ending || relaxed_load(&fetcher->abandoned) ||
	    relaxed_load(&run->cancel_id) == id || now_ns > relaxed_load(&run->lease_ns)) {
		end(run, PREFETCH_CANCELLED, NULL);
		drop_queued(fetcher, id);
		return;
	}
	if (run->uncached_in_a_row >= UNCACHED_MAX) {
		end(run, PREFETCH_FAILED, "the cache takes nothing more (see its log)");
		drop_queued(fetcher, id);
		return;
	}
	at_ns = begin_some(fetcher, now_ns);
	units_admit(fetcher);
	if (run->extent == run->plan.count && !run->under_way) {
		end(run, PREFETCH_DONE, NULL);
		return;
	}
	if (at_ns > now_ns + TICK_MS * NS_PER_MS)
		at_ns = now_ns + TICK_MS * NS_PER_MS;
	/* NB: a unit that was just admitted may be over already, and have set the timer. */
	if (!timer_is_set(&run->timer) || run->timer.at_ns > at_ns)
		timer_set(&fetcher->timers, &run->timer, at_ns);
}

static void run_timer_expired(struct timer *timer)
{
	step(container_of(timer, struct fetcher, run.timer));
}

bool prefetch_wants(const struct unit *unit)
{
	const struct prefetch_run *run = &unit->fetcher->run;

	return state_of(run) == PREFETCH_RUNNING && unit->prefetch_id == relaxed_load(&run->id);
}

void prefetch_unit_over(struct unit *unit)
{
	struct fetcher *fetcher = unit->fetcher;
	struct prefetch_run *run = &fetcher->run;
	bool ours = prefetch_wants(unit);

	unit->prefetch_id = 0;
	if (!ours)
		return;
	run->under_way--;
	if (unit->state != UNIT_STORING || unit->check.found)
		run->plan.room.bytes += cache_room_of(unit->length);
	if (unit->state == UNIT_STORING && unit->check.found) {
		relaxed_add(&run->cached_units, 1);
		run->next_ns -= cost_ns(run, unit->length);
	} else if (unit->state == UNIT_STORING) {
		relaxed_add(&run->fetched_units, 1);
		relaxed_add(&run->fetched_bytes, unit->length);
		run->uncached_in_a_row = 0;
	} else if (unit->state == UNIT_KEPT || unit->state == UNIT_UNSTORED) {
		relaxed_add(&run->uncached_units, 1);
		run->uncached_in_a_row++;
	} else {
		relaxed_add(&run->failed_units, 1);
	}
	/* Let the timer do it, not this call from within the life of a unit. */
	if (!fetcher->ending)
		timer_set(&fetcher->timers, &run->timer, clock_now_ns());
}

bool prefetch_tries_again(const struct unit *unit)
{
	return prefetch_wants(unit) && unit->rounds < ROUNDS_MAX;
}

static void woken(struct fetcher *fetcher, struct fetcher_message *message)
{
	free(message);
	step(fetcher);
}

/* Makes a message that has the fetcher's thread take a step; NULL when memory is short. */
static struct fetcher_message *new_wakeup(void)
{
	struct fetcher_message *message = calloc(1, sizeof(*message));

	if (message)
		message->arrive = woken;
	return message;
}

static void prepare(struct prefetch_run *run, const struct prefetch_plan *plan)
{
	uint64_t units = 0;

	for (size_t i = 0; i < plan->count; i++)
		units += plan->extents[i].count;
	run->plan = *plan;
	run->extent = 0;
	run->in_extent = 0;
	run->under_way = 0;
	run->uncached_in_a_row = 0;
	run->next_ns = 0;
	relaxed_store(&run->why, NULL);
	relaxed_store(&run->units, units);
	relaxed_store(&run->cached_units, 0);
	relaxed_store(&run->fetched_units, 0);
	relaxed_store(&run->failed_units, 0);
	relaxed_store(&run->uncached_units, 0);
	relaxed_store(&run->fetched_bytes, 0);
	relaxed_store(&run->holds_bytes, plan->room.holds_bytes);
	relaxed_store(&run->bytes_per_s, plan->bytes_per_s);
	relaxed_store(&run->started_ns, clock_now_ns());
	relaxed_store(&run->lease_ns, UINT64_MAX);
	relaxed_store(&run->id, run->id + 1);
}

int prefetch_start(struct fetcher *fetcher, const struct prefetch_plan *plan, uint64_t *id)
{
	struct prefetch_run *run = &fetcher->run;
	struct fetcher_message *message = new_wakeup();
	int err = 0;

	if (!message)
		return -ENOMEM;
	pthread_mutex_lock(&run->start_lock);
	if (state_of(run) == PREFETCH_RUNNING) {
		err = -EBUSY;
		free(message);
	} else {
		prepare(run, plan);
		*id = run->id;
		if (plan->followed)
			prefetch_follow(fetcher, run->id);
		__atomic_store_n(&run->state, PREFETCH_RUNNING, __ATOMIC_RELEASE);
		fetcher_send(fetcher, message);
	}
	pthread_mutex_unlock(&run->start_lock);
	return err;
}

void prefetch_cancel(struct fetcher *fetcher, uint64_t id)
{
	struct fetcher_message *message = new_wakeup();

	relaxed_store(&fetcher->run.cancel_id, id);
	/* Without memory, the next tick notices it. */
	if (message)
		fetcher_send(fetcher, message);
}

void prefetch_follow(struct fetcher *fetcher, uint64_t id)
{
	struct prefetch_run *run = &fetcher->run;

	if (relaxed_load(&run->id) == id)
		relaxed_store(&run->lease_ns, clock_now_ns() + PREFETCH_LEASE_S * NS_PER_S);
}

bool prefetch_is_running(struct fetcher *fetcher, uint64_t id)
{
	struct prefetch_run *run = &fetcher->run;

	return state_of(run) == PREFETCH_RUNNING && (!id || relaxed_load(&run->id) == id);
}

static double percent(uint64_t done, uint64_t all)
{
	uint64_t per_mille = all ? done * 1000 / all : 1000;

	/* Rounded down, so that 100 means that all is done. */
	return (double)per_mille / 10.0;
}

json_t *prefetch_json(struct fetcher *fetcher)
{
	static const char *const states[] = {
		[PREFETCH_RUNNING] = "running",
		[PREFETCH_DONE] = "done",
		[PREFETCH_CANCELLED] = "cancelled",
		[PREFETCH_FAILED] = "failed",
	};
	struct prefetch_run *run = &fetcher->run;
	enum prefetch_state state = state_of(run);
	uint64_t cached = relaxed_load(&run->cached_units);
	uint64_t fetched = relaxed_load(&run->fetched_units);
	uint64_t failed = relaxed_load(&run->failed_units);
	uint64_t uncached = relaxed_load(&run->uncached_units);
	uint64_t units = relaxed_load(&run->units);
	uint64_t until_ns = state == PREFETCH_RUNNING ? clock_now_ns() :
							relaxed_load(&run->ended_ns);
	uint64_t started_ns = relaxed_load(&run->started_ns);

	if (state == PREFETCH_NONE)
		return json_null();
	return json_pack("{s:I, s:s, s:s?, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:f, s:f}", "id",
			 (json_int_t)relaxed_load(&run->id), "state", states[state], "why",
			 relaxed_load(&run->why), "units", (json_int_t)units, "cached_units",
			 (json_int_t)cached, "fetched_units", (json_int_t)fetched, "failed_units",
			 (json_int_t)failed, "uncached_units", (json_int_t)uncached,
			 "fetched_bytes", (json_int_t)relaxed_load(&run->fetched_bytes),
			 "bytes_per_s", (json_int_t)relaxed_load(&run->bytes_per_s), "holds_bytes",
			 (json_int_t)relaxed_load(&run->holds_bytes), "percent",
			 percent(cached + fetched + failed + uncached, units), "seconds",
			 until_ns > started_ns ? (double)(until_ns - started_ns) / 1e9 : 0.0);
}

void prefetch_run_init(struct fetcher *fetcher)
{
	pthread_mutex_init(&fetcher->run.start_lock, NULL);
	fetcher->run.timer.expire = run_timer_expired;
}

void prefetch_run_deinit(struct fetcher *fetcher)
{
	free(fetcher->run.plan.extents);
	pthread_mutex_destroy(&fetcher->run.start_lock);
}
