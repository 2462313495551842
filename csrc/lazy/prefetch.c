/* SPDX-License-Identifier: MIT */
#include "lazy/prefetch.h"

#include <errno.h>
#include <stdlib.h>

#include "base/relaxed.h"
#include "content/layout.h"

enum {
	/* How much of the rate may be caught up after a pause, and is waited for together. */
	BURST_MS = 100,
	/* How often it checks whether a client still wants it when nothing else happens. */
	TICK_MS = 500,
	/* Cache lookups in one go, before others have their turn on the fetcher's thread. */
	LOOKS_AT_ONCE = 4096,
	/* The share of the slots that it uses while readers wait. */
	YIELDING_SHARE = 8,
	ROUNDS_MAX = 2,
	UNCACHED_MAX = 64,
};

static enum prefetch_state state_of(const struct prefetch *run)
{
	return __atomic_load_n(&run->state, __ATOMIC_ACQUIRE);
}

static void end(struct prefetch *run, enum prefetch_state state, const char *why)
{
	timer_clear(&run->timer);
	for (unsigned i = 0; i < PREFETCH_AT_ONCE_MAX; i++)
		subscription_end(&run->wanted[i].subscription);
	free(run->plan.extents);
	run->plan.extents = NULL;
	relaxed_store(&run->why, why);
	relaxed_store(&run->ended_ns, clock_now_ns());
	__atomic_store_n(&run->state, state, __ATOMIC_RELEASE);
	if (run->over)
		completion_put(run->core, run->over);
}

static uint64_t cost_ns(const struct prefetch *run, uint32_t bytes)
{
	uint64_t rate = run->plan.bytes_per_s;

	return rate ? bytes * NS_PER_S / rate : 0;
}

static void pay(struct prefetch *run, uint32_t bytes, uint64_t now_ns)
{
	uint64_t earliest_ns = now_ns - BURST_MS * NS_PER_MS;

	if (run->next_ns < earliest_ns)
		run->next_ns = earliest_ns;
	run->next_ns += cost_ns(run, bytes);
}

static unsigned most_under_way(const struct prefetch *run)
{
	unsigned most = run->plan.at_once;

	/* So few do not delay readers, who mostly wait for the next of these units. */
	if (!run->core->counts.reads_waiting || most <= YIELDING_SHARE)
		return most;
	return most / YIELDING_SHARE;
}

/* Until when it waits for readers, as far as is known now; 0: it need not. */
static uint64_t waits_until_ns(struct prefetch *run, uint64_t now_ns)
{
	const struct fetch_counts *counts = &run->core->counts;

	if (!run->plan.quiet_ns)
		return 0;
	if (counts->reads_waiting || counts->reads != run->reads_seen)
		run->quiet_at_ns = now_ns + run->plan.quiet_ns;
	run->reads_seen = counts->reads;
	relaxed_store(&run->waits, run->quiet_at_ns > now_ns);
	return run->quiet_at_ns > now_ns ? run->quiet_at_ns : 0;
}

static void have_step(struct prefetch *run)
{
	completion_put(run->core, &run->news);
}

static void stored(struct subscription *subscription, const struct unit *unit)
{
	struct prefetch *run =
		container_of(subscription, struct prefetch_unit, subscription)->prefetch;

	run->under_way--;
	if (unit->fate != FATE_STORED)
		run->plan.room.bytes += cache_room_of(unit->length);
	if (unit->fate == FATE_FOUND) {
		relaxed_add(&run->cached_units, 1);
		run->next_ns -= cost_ns(run, unit->length);
	} else if (unit->fate == FATE_STORED) {
		relaxed_add(&run->fetched_units, 1);
		relaxed_add(&run->fetched_bytes, unit->length);
		run->uncached_in_a_row = 0;
	} else {
		relaxed_add(&run->uncached_units, 1);
		run->uncached_in_a_row++;
	}
	have_step(run);
}

static void failed(struct subscription *subscription, int err)
{
	struct prefetch *run =
		container_of(subscription, struct prefetch_unit, subscription)->prefetch;

	run->under_way--;
	run->plan.room.bytes += cache_room_of(subscription->unit->length);
	relaxed_add(&run->failed_units, 1);
	have_step(run);
}

static const struct subscription_ops prefetch_ops = {
	.right = stored,
	.failed = failed,
	.until_stored = true,
	.urgency = URGENCY_BACKGROUND,
	.rounds = ROUNDS_MAX,
};

/* Returns its place for a unit that it waits for, or else a free one. */
static struct prefetch_unit *place_of(struct prefetch *run, const struct source *source,
				      uint64_t number)
{
	struct prefetch_unit *found = NULL;

	for (unsigned i = 0; i < PREFETCH_AT_ONCE_MAX; i++) {
		struct prefetch_unit *place = &run->wanted[i];
		const struct unit *unit = place->subscription.unit;

		if (!link_is_in_list(&place->subscription.link))
			found = place;
		else if (unit->source == source && unit->number == number)
			return place;
	}
	return found;
}

/* Asks for the next unit. */
static void want(struct prefetch *run, struct source *source, uint64_t number, uint64_t now_ns)
{
	struct prefetch_unit *place = place_of(run, source, number);
	const struct unit *unit = unit_find(run->core, source, number);
	uint32_t length = unit_extent(source, number).length;
	uint64_t takes = cache_room_of(length);

	if (link_is_in_list(&place->subscription.link)) {
		relaxed_add(&run->cached_units, 1); /* the list has it twice */
		return;
	}
	if (run->plan.room.bytes < takes ||
	    (unit && unit->state == UNIT_VERIFIED && unit->fate == FATE_LOST)) {
		relaxed_add(&run->uncached_units, 1);
		return;
	}
	place->prefetch = run;
	place->subscription = (struct subscription){ .ops = &prefetch_ops };
	if (subscribe(run->core, &place->subscription, source, number)) {
		relaxed_add(&run->failed_units, 1);
		return;
	}
	run->plan.room.bytes -= takes;
	run->under_way++;
	pay(run, length, now_ns);
}

static void advance(struct prefetch *run)
{
	if (++run->in_extent < run->plan.extents[run->extent].count)
		return;
	run->in_extent = 0;
	run->extent++;
}

/*
 * When the rate allows the next units: not each as soon as it may be, because neighbours that are
 * asked for together are one request.
 */
static uint64_t allowed_ns(const struct prefetch *run, unsigned most)
{
	uint64_t wait_ns = BURST_MS * NS_PER_MS, batch_ns;

	if (run->extent == run->plan.count)
		return 0;
	batch_ns = most / 2 * cost_ns(run, run->plan.extents[run->extent].source->unit_bytes);
	return run->next_ns + (batch_ns < wait_ns ? batch_ns : wait_ns);
}

/* Returns when to call it again. */
static uint64_t begin_some(struct prefetch *run, uint64_t now_ns)
{
	uint64_t quiet_at_ns = waits_until_ns(run, now_ns);
	unsigned most = most_under_way(run), looks = 0;

	if (quiet_at_ns)
		return quiet_at_ns;
	if (run->under_way > most / 2)
		return UINT64_MAX;
	if (allowed_ns(run, most) > now_ns)
		return allowed_ns(run, most);
	while (run->extent < run->plan.count && run->under_way < most) {
		const struct prefetch_extent *extent = &run->plan.extents[run->extent];
		uint64_t number = extent->first + run->in_extent;

		if (looks++ == LOOKS_AT_ONCE)
			return now_ns;
		if (cache_has_unit(extent->source, number))
			relaxed_add(&run->cached_units, 1);
		else if (run->next_ns > now_ns)
			return allowed_ns(run, most);
		else
			want(run, extent->source, number, now_ns);
		advance(run);
	}
	return UINT64_MAX;
}

static void step(struct prefetch *run)
{
	struct core *core = run->core;
	uint64_t now_ns = clock_now_ns(), at_ns, id;

	if (state_of(run) != PREFETCH_RUNNING)
		return;
	id = relaxed_load(&run->id);
	if (core->ending || relaxed_load(&core->abandoned) || relaxed_load(&run->cancel_id) == id ||
	    now_ns > relaxed_load(&run->lease_ns)) {
		end(run, PREFETCH_CANCELLED, NULL);
		return;
	}
	if (run->uncached_in_a_row >= UNCACHED_MAX) {
		end(run, PREFETCH_FAILED, "the cache takes nothing more (see its log)");
		return;
	}
	at_ns = begin_some(run, now_ns);
	if (run->extent == run->plan.count && !run->under_way) {
		end(run, PREFETCH_DONE, NULL);
		return;
	}
	if (at_ns > now_ns + TICK_MS * NS_PER_MS)
		at_ns = now_ns + TICK_MS * NS_PER_MS;
	timer_set(&core->timers, &run->timer, at_ns);
}

static void timer_expired(struct timer *timer)
{
	have_step(container_of(timer, struct prefetch, timer));
}

static void take_news(struct core *core, struct completion *completion)
{
	step(container_of(completion, struct prefetch, news));
}

/* A message that has a prefetch take a step. */
struct wake_up {
	struct completion sent;
	struct prefetch *prefetch;
};

static void woken(struct core *core, struct completion *completion)
{
	struct wake_up *wake_up = container_of(completion, struct wake_up, sent);

	step(wake_up->prefetch);
	free(wake_up);
}

/* Returns NULL when memory is short. */
static struct wake_up *new_wake_up(struct prefetch *run)
{
	struct wake_up *wake_up = calloc(1, sizeof(*wake_up));

	if (wake_up) {
		wake_up->sent.take = woken;
		wake_up->prefetch = run;
	}
	return wake_up;
}

static void prepare(struct prefetch *run, const struct prefetch_plan *plan)
{
	uint64_t units = 0;

	for (size_t i = 0; i < plan->count; i++)
		units += plan->extents[i].count;
	run->plan = *plan;
	run->extent = 0;
	run->in_extent = 0;
	run->under_way = 0;
	run->uncached_in_a_row = 0;
	if (!plan->keeps_pace)
		run->next_ns = 0;
	relaxed_store(&run->waits, false);
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

int prefetch_start(struct prefetch *run, const struct prefetch_plan *plan, uint64_t *id)
{
	struct wake_up *wake_up = new_wake_up(run);
	int err = 0;

	if (!wake_up)
		return -ENOMEM;
	pthread_mutex_lock(&run->start_lock);
	if (state_of(run) == PREFETCH_RUNNING) {
		err = -EBUSY;
		free(wake_up);
	} else {
		prepare(run, plan);
		*id = run->id;
		if (plan->followed)
			prefetch_follow(run, run->id);
		__atomic_store_n(&run->state, PREFETCH_RUNNING, __ATOMIC_RELEASE);
		core_send(run->core, &wake_up->sent);
	}
	pthread_mutex_unlock(&run->start_lock);
	return err;
}

void prefetch_cancel(struct prefetch *run, uint64_t id)
{
	struct wake_up *wake_up = new_wake_up(run);

	relaxed_store(&run->cancel_id, id);
	/* Without memory, the next tick notices it. */
	if (wake_up)
		core_send(run->core, &wake_up->sent);
}

void prefetch_follow(struct prefetch *run, uint64_t id)
{
	if (relaxed_load(&run->id) == id)
		relaxed_store(&run->lease_ns, clock_now_ns() + PREFETCH_LEASE_S * NS_PER_S);
}

bool prefetch_is_running(const struct prefetch *run, uint64_t id)
{
	return state_of(run) == PREFETCH_RUNNING && (!id || relaxed_load(&run->id) == id);
}

static double percent(uint64_t done, uint64_t all)
{
	uint64_t per_mille = all ? done * 1000 / all : 1000;

	/* Rounded down, so that 100 means that all is done. */
	return (double)per_mille / 10.0;
}

json_t *prefetch_json(const struct prefetch *run)
{
	static const char *const states[] = {
		[PREFETCH_RUNNING] = "running",
		[PREFETCH_DONE] = "done",
		[PREFETCH_CANCELLED] = "cancelled",
		[PREFETCH_FAILED] = "failed",
	};
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

void prefetch_init(struct prefetch *run, struct core *core)
{
	pthread_mutex_init(&run->start_lock, NULL);
	run->core = core;
	run->timer.expire = timer_expired;
	run->news.take = take_news;
}

void prefetch_deinit(struct prefetch *run)
{
	free(run->plan.extents);
	pthread_mutex_destroy(&run->start_lock);
}

void prefetch_abandon(struct prefetch *run)
{
	if (state_of(run) == PREFETCH_RUNNING)
		end(run, PREFETCH_CANCELLED, NULL);
}
