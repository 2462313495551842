/* SPDX-License-Identifier: MIT */
/* Which units become one request, what arrives of it, and how long it is waited for. */
#include "lazy/run.h"

#include <errno.h>
#include <openssl/evp.h>
#include <stdlib.h>
#include <string.h>

#include "base/relaxed.h"
#include "content/cache.h"
#include "content/identity.h"
#include "content/layout.h"
#include "content/selection.h"
#include "lazy/core.h"
#include "lazy/patience.h"

enum {
	/* What a kind is told for several units: each of them has a deadline here. */
	RUN_MAX_S = 900,
	/* For a cache that is only slow. */
	CACHE_SLOW_MAX_MS = 6000,
	/* How long a run may wait for memory. Longer, and its server would give it up. */
	PAUSE_MAX_S = 5,
	/* Where so many bytes have a place, the units behind get no memory yet. */
	PLACES_BYTES = 64 << 10,
	/* Of a source with a codec, before and after decoding: all of it is in memory at once. */
	CODED_RUN_BYTES = 2 << 20,
	/* A reader waits so long for the units before its own, whatever a request would take. */
	AHEAD_MIN_MS = 20,
	/* What says how fast a run is. */
	RATE_MIN_BYTES = 64 << 10,
};

static struct unit *arriving(const struct run *run)
{
	return run->units[run->next];
}

/* Units leave. */

/* Those from `index` on leave the run, and are queued again if they are wanted. */
static void leave_from(struct run *run, unsigned index)
{
	for (unsigned i = index; i < run->count; i++) {
		struct unit *unit = run->units[i];

		unit->run = NULL;
		unit_set(unit, UNIT_WANTED);
		if (!list_is_empty(&unit->subscriptions))
			completion_put(run->core, &unit->news);
	}
	run->count = index;
}

void run_trim(struct run *run)
{
	unsigned count = run->count;

	/* The server sends all of it anyway, so units without a reader stay. */
	if (run->widened)
		return;
	while (count > run->next + 1 && list_is_empty(&run->units[count - 1]->subscriptions))
		count--;
	if (!run->is_over)
		leave_from(run, count);
}

/* How fast it is; 0: not known. */
static uint64_t bytes_per_s(const struct run *run, uint64_t now_ns)
{
	const struct host *host = run->mirror->host;

	if (run->arrived_bytes < RATE_MIN_BYTES || now_ns <= run->first_ns)
		return host ? host->bytes_per_s : 0;
	return run->arrived_bytes * 1000 / ((now_ns - run->first_ns) / 1000000 + 1);
}

/*
 * Whether a reader of that unit would have it much sooner by a request of its own. Not where others
 * read what comes before it: they are readers in order, whom this run serves well.
 */
static bool is_far_ahead(const struct run *run, unsigned index, uint64_t now_ns)
{
	const struct host *host = run->mirror->host;
	const struct unit *unit = run->units[index];
	uint64_t rate = bytes_per_s(run, now_ns), wait_ns, own_ns;
	uint64_t before = (unit->number - arriving(run)->number) * unit->source->unit_bytes;

	if (!rate || !host || unit_reader(run->units[index - 1]))
		return false;
	wait_ns = (before - run->filled) * 1000 / rate * 1000000;
	own_ns = (host->rtt_ns ?: run->first_ns - run->began_ns) +
		 unit->length * NS_PER_S / (host->bytes_per_s ?: rate);
	return wait_ns > 2 * own_ns && wait_ns > AHEAD_MIN_MS * NS_PER_MS;
}

/* Has units leave whose readers it keeps waiting. */
static void split(struct run *run, uint64_t now_ns)
{
	/* NB: a request of its own would have all of the object sent again. */
	if (run->widened)
		return;
	for (unsigned i = run->next + 1; run->demanded && i < run->count; i++) {
		if (unit_reader(run->units[i]) && is_far_ahead(run, i, now_ns))
			leave_from(run, i);
	}
}

/* How long. */

static void look_for_progress(struct timer *timer);

static void watch_silence(struct run *run, uint64_t since_ns, uint64_t at_ns)
{
	run->progress_seen = run->progress;
	run->watched_ns = since_ns;
	run->timer.expire = look_for_progress;
	timer_set(&run->core->timers, &run->timer, at_ns);
}

/*
 * What is silent altogether is given up at once. A cache that answers others is slow, perhaps
 * because its origin is; and if all that wait for it asked the origin, that would be slower still.
 * A mirror that has answered others is charged with nothing either.
 */
static bool is_given_up(struct run *run, uint64_t now_ns)
{
	const struct host *host = run->mirror->host;

	if (!host || host->answered_ns < run->began_ns)
		return true;
	if (!run->mirror->via) {
		run->slow = run_has_second(run, now_ns);
		return true;
	}
	if (now_ns >= host->answered_ns + run_first_silence_ns(run))
		return true;
	if (run->began_ns + CACHE_SLOW_MAX_MS * NS_PER_MS > now_ns)
		return false;
	/* NB: one that waits on, and fails later, fails as any other. */
	run->slow = true;
	return true;
}

static void look_for_progress(struct timer *timer)
{
	struct run *run = container_of(timer, struct run, timer);
	uint64_t now_ns = clock_now_ns();
	/* The time before the request went out does not count as silence. */
	uint64_t since_ns = run->held ? now_ns : run->began_ns;

	if (since_ns > run->watched_ns && now_ns < run->until_ns) {
		uint64_t at_ns = since_ns + run_first_silence_ns(run);

		watch_silence(run, since_ns, at_ns < run->until_ns ? at_ns : run->until_ns);
	} else if (run->progress != run->progress_seen &&
		   (run->asked == 1 || now_ns < run->until_ns)) {
		split(run, now_ns);
		watch_silence(run, now_ns, run_silent_at_ns(run, now_ns));
	} else if (run->progress != run->progress_seen) {
		run_cancel(run);
	} else if (is_given_up(run, now_ns)) {
		/* NB: the others that wait for it have waited as long, and must not wait again. */
		run->silent = run->mirror->via && !run->slow;
		run_cancel(run);
	} else {
		watch_silence(run, now_ns,
			      run->mirror->host->answered_ns + run_first_silence_ns(run));
	}
}

/* The unit that arrives has not come in time. */
static void is_late(struct timer *timer)
{
	run_cancel(container_of(timer, struct run, timer));
}

/* Begins to watch the unit that arrives. A kind keeps the deadline of a single one itself. */
static void watch(struct run *run, uint64_t now_ns)
{
	const struct mirror_ops *ops = run->mirror->ops;
	const struct unit *unit = arriving(run);

	timer_clear(&run->timer);
	run->until_ns = run_attempt_deadline_ns(unit, run->mirror, now_ns);
	if (run->mirror->via || (ops->cancel && !ops->blocking && run_has_second(run, now_ns))) {
		uint64_t at_ns = now_ns + run_first_silence_ns(run);

		/* Readers may have less time than that, and another place something of it. */
		watch_silence(run, now_ns, at_ns < run->until_ns ? at_ns : run->until_ns);
	} else if (!unit_reader(unit) && ops->cancel) {
		uint64_t last_ns = run->demanded ? run_last_deadline_ns(run) : 0;

		watch_silence(run, now_ns, now_ns + run_silence_ns(run, last_ns, now_ns));
	} else if (ops->blocking || (run->asked > 1 && ops->cancel)) {
		run->timer.expire = is_late;
		timer_set(&run->core->timers, &run->timer, run->until_ns);
	}
}

static bool has_reader(const struct run *run)
{
	for (unsigned i = run->next; run->demanded && i < run->count; i++) {
		if (unit_reader(run->units[i]))
			return true;
	}
	return false;
}

void run_joined(struct unit *unit, uint64_t deadline_ns)
{
	struct run *run = unit->run;
	bool watched = timer_is_set(&run->timer) && run->timer.expire == look_for_progress;
	uint64_t now_ns, at_ns;

	if (run->is_over || !run->mirror->ops->cancel || link_is_in_list(&run->paused))
		return;
	/* An attempt that began for a reader with no more time than this ends in time by itself. */
	if (!watched && run->until_ns <= deadline_ns)
		return;
	now_ns = clock_now_ns();
	at_ns = now_ns + run_silence_ns(run, deadline_ns, now_ns);
	/*
	 * For the first reader, silence before it came does not count: the response may be about to
	 * arrive.
	 */
	if (!watched || !has_reader(run) || at_ns < run->timer.at_ns)
		watch_silence(run, now_ns, at_ns);
}

void run_cancel(struct run *run)
{
	if (link_is_in_list(&run->unstarted)) {
		list_remove(&run->unstarted);
		run->uncharged = true;
		run_failed(run, FETCH_TRANSIENT, error_set(&run->error, -ECANCELED, "not begun"));
	} else if (!run->is_over && run->mirror->ops->cancel) {
		run->mirror->ops->cancel(run);
	}
}

void run_is_demanded(struct unit *unit)
{
	struct run *run = unit->run;

	if (run->is_over)
		return;
	if (!run->demanded && run->mirror->host)
		run->mirror->host->prefetching--;
	run->demanded = true;
	split(run, clock_now_ns());
}

/* What arrives. */

static bool has_memory(struct unit *unit)
{
	uint8_t *data;

	if (unit->data)
		return true;
	data = unit_make_room(unit) ? unit_new_data(unit) : NULL;
	if (data)
		unit_reserve(unit, data);
	return data;
}

static void paused_for_long(struct timer *timer)
{
	struct run *run = container_of(timer, struct run, timer);

	run->uncharged = true;
	run_cancel(run);
}

static void pause(struct run *run)
{
	if (link_is_in_list(&run->paused))
		return;
	list_append(&run->core->paused, &run->paused);
	run->timer.expire = paused_for_long;
	timer_set(&run->core->timers, &run->timer, clock_now_ns() + PAUSE_MAX_S * NS_PER_S);
}

void runs_resume(struct core *core)
{
	struct link waiting, *link;

	list_init(&waiting);
	while ((link = list_first(&core->paused))) {
		list_remove(link);
		list_append(&waiting, link);
	}
	while ((link = list_first(&waiting))) {
		struct run *run = container_of(link, struct run, paused);

		list_remove(link);
		if (!unit_make_room(arriving(run))) {
			list_append(&core->paused, link);
			continue;
		}
		watch(run, clock_now_ns());
		run->mirror->ops->resume(run);
	}
}

/* How many bytes come before the unit that arrives, which belong nowhere. */
static uint64_t gap(const struct run *run)
{
	const struct unit *unit = arriving(run);

	return unit_extent(unit->source, unit->number).offset + run->filled - run->at;
}

/* The next unit arrives. */
static void expect_next(struct run *run)
{
	unit_set(arriving(run), UNIT_FETCHING);
	unit_expect(arriving(run));
}

/* Whether it may be left out where memory is short: it came unasked, or keeps a reader waiting. */
static bool may_be_passed_over(const struct run *run)
{
	const struct unit *unit = arriving(run);

	return run->widened && run->next + 1 < run->count && !run->filled &&
	       (list_is_empty(&unit->subscriptions) || (!unit_reader(unit) && has_reader(run)));
}

static void pass_over(struct run *run)
{
	while (may_be_passed_over(run) && !has_memory(arriving(run))) {
		struct unit *unit = run->units[run->next++];

		unit->run = NULL;
		unit_set(unit, UNIT_WANTED);
		if (!list_is_empty(&unit->subscriptions))
			completion_put(run->core, &unit->news);
		expect_next(run);
	}
}

static int space(struct run *run, struct iovec *parts, int room)
{
	size_t bytes = 0;
	int count = 0;

	if (run->next < run->count)
		pass_over(run);
	/* NB: units may leave while room is made for one. */
	for (unsigned i = run->next; i < run->count && count < room && bytes < PLACES_BYTES; i++) {
		struct unit *unit = run->units[i];
		uint32_t filled = i == run->next ? run->filled : 0;
		uint64_t before = i == run->next ? gap(run) : 0;

		if (!has_memory(unit) || i >= run->count)
			break;
		if (i > run->next && unit->number != run->units[i - 1]->number + 1)
			break;
		/* It overwrites itself. */
		if (before) {
			parts[0].iov_base = unit->data;
			parts[0].iov_len = before < unit->length ? before : unit->length;
			return 1;
		}
		parts[count].iov_base = unit->data + filled;
		parts[count].iov_len = unit->length - filled;
		bytes += parts[count++].iov_len;
	}
	if (!count && run->next < run->count)
		pause(run);
	return count;
}

/*
 * Hashes what has come while there is nothing better to do: the socket is empty, and nothing else
 * is in flight. A worker hashes units that have come faster.
 */
static void hash_some(struct run *run)
{
	const struct core *core = run->core;
	const struct unit *unit = arriving(run);

	if (!core->store || unit->length <= HASH_AT_ONCE_BYTES || run->filled == unit->length ||
	    (!run->hashed && core->busy > 1))
		return;
	if (!run->hash)
		run->hash = EVP_MD_CTX_new();
	if (!run->hash || (!run->hashed && !EVP_DigestInit_ex2(run->hash, core->sha256, NULL)) ||
	    !EVP_DigestUpdate(run->hash, unit->data + run->hashed, run->filled - run->hashed))
		return;
	run->hashed = run->filled;
}

/* Takes the digest of a unit, if only little of it is not hashed. */
static void take_digest(struct run *run, struct unit *unit)
{
	struct unit_check *check = &unit->check;

	if (run->hashed && unit->length - run->hashed <= HASH_ALONE_BYTES)
		check->hashed = EVP_DigestUpdate(run->hash, unit->data + run->hashed,
						 unit->length - run->hashed) &&
				EVP_DigestFinal_ex(run->hash, check->digest, NULL);
	run->hashed = 0;
}

static void identify(const struct run *run, struct unit *unit)
{
	const struct mirror *mirror = run->mirror;

	if (run->identity && mirror->identity) {
		/* Another run has pinned one meanwhile. */
		unit->check.err = identity_is_same(mirror->identity, run->identity) ? 0 : -ESTALE;
	} else if (run->identity) {
		unit->identity = strdup(run->identity);
		unit->check.err = unit->identity ? 0 : -ENOMEM;
	}
}

/* A unit is whole, and has no part in the run any more. */
void run_leave(struct run *run)
{
	struct unit *unit = arriving(run);
	struct fetch_counts *counts = &run->core->counts;
	struct mirror *mirror = run->mirror;

	run->next++;
	run->filled = 0;
	unit->run = NULL;
	unit->tries[mirror->index]++;
	unit->check = (struct unit_check){};
	take_digest(run, unit);
	identify(run, unit);
	relaxed_add(&counts->units_fetched, 1);
	relaxed_add(&counts->bytes_fetched, unit->length);
	if (run->widened && list_is_empty(&unit->subscriptions))
		relaxed_add(&counts->whole_units, 1);
	if (mirror->host) {
		host_gave(mirror->host, unit->length);
		mirror->host->answered_ns = clock_now_ns();
	}
	if (mirror->latency && run->next == 1)
		histogram_add(&mirror->latency->histogram, clock_now_ns() - run->began_ns, 1);
	completion_put(run->core, &unit->news);
}

/* NB: the last one that was asked for is not whole before the response has ended well. */
static void take(struct run *run, size_t bytes)
{
	uint64_t now_ns;

	run->last_ns = clock_now_ns();
	if (!run->arrived_bytes) {
		run->first_ns = run->last_ns;
	}
	run->arrived_bytes += bytes;
	if (run->next < run->count && gap(run)) {
		run->at += bytes;
		return;
	}
	run->at += bytes;
	while (bytes && run->next < run->count) {
		uint32_t left = arriving(run)->length - run->filled;

		if (bytes < left || run->next + 1 == run->asked) {
			run->filled += (uint32_t)bytes;
			hash_some(run);
			return;
		}
		bytes -= left;
		run_leave(run);
		if (run->next == run->count) {
			/* Nobody wants the rest: the step ends it. */
			timer_clear(&run->timer);
			completion_put(run->core, &run->news);
			return;
		}
		expect_next(run);
		now_ns = clock_now_ns();
		split(run, now_ns);
		watch(run, now_ns);
	}
}

static uint8_t *take_all(struct run *run, uint8_t *data)
{
	struct unit *unit;
	uint8_t *unused;

	if (run->next == run->count)
		return data;
	unit = arriving(run);
	unused = unit->data;
	unit->data = data;
	take(run, unit->length);
	return unused;
}

static void over(struct run *run)
{
	run->is_over = true;
	timer_clear(&run->timer);
	list_remove(&run->paused);
	completion_put(run->core, &run->news);
}

/* Ends a run that has got nothing, whose units come otherwise. */
static void give_away(struct run *run)
{
	leave_from(run, run->next);
	timer_clear(&run->timer);
	list_remove(&run->paused);
	completion_put(run->core, &run->news);
}

/* Whether a run that gets all of the object can have the unit; else its bytes are dropped. */
static bool may_adopt(struct unit *unit, const struct run *run)
{
	struct run *other = unit->run;

	if (other && other != run && other->mirror == run->mirror && !other->arrived_bytes &&
	    !other->is_over && !other->widened)
		give_away(other);
	return unit->run == run || unit->state == UNIT_WANTED || unit->state == UNIT_RESTING;
}

/* Finds the units of all of the object that this run can have, which has some of them. */
static unsigned find_all(const struct run *run, struct unit **units, uint64_t total)
{
	unsigned count = 0;

	for (uint64_t number = 0; number < total; number++) {
		struct unit *unit = unit_get(run->core, run->mirror->source, number);

		if (!unit || !may_adopt(unit, run))
			continue;
		if (list_is_empty(&unit->subscriptions) && unit->run != run &&
		    cache_has_unit(unit->source, number))
			unit_let_go(unit);
		else
			units[count++] = unit;
	}
	return count;
}

/*
 * The server sends all of the object, so all of its units that lack are taken, and none is asked for
 * again. Those that another run waits for at the same mirror, which would be sent all of it as well,
 * come from here.
 */
static void widen(struct run *run)
{
	const struct source *source = run->mirror->source;
	uint64_t now_ns = clock_now_ns(), total = unit_of(source, source->size - 1) + 1;
	struct unit **units;

	run->widens = false;
	run->offset = run->at = 0;
	run->length = (uint32_t)source->size;
	/* Behind the last one that is wanted, there may be more. */
	run->asked = run->count + 1;
	/* Another run may have got all that it was for. */
	units = run->next < run->count ? calloc(total, sizeof(struct unit *)) : NULL;
	if (!units)
		return;
	run->widened = true;
	run->count = find_all(run, units, total);
	if (run->units != &run->only)
		free(run->units);
	run->units = units;
	for (unsigned i = 0; i < run->count; i++) {
		struct unit *unit = units[i];

		unit->run = run;
		unit->mirror = run->mirror;
		unit->began_ns = now_ns;
		unit_set(unit, UNIT_ASKED);
		if (unit->urgency == URGENCY_DEMAND && !run->demanded)
			run_is_demanded(unit);
	}
	run->asked = run->count + (units[run->count - 1]->number + 1 < total);
	expect_next(run);
	watch(run, now_ns);
}

static const struct run_sink core_sink = {
	.space = space,
	.take = take,
	.take_all = take_all,
	.widen = widen,
	.over = over,
};

/* What is asked for. */

void run_free(struct run *run)
{
	EVP_MD_CTX_free(run->hash);
	free(run->identity);
	if (run->units != &run->only)
		free(run->units);
	free(run);
}

static uint64_t most_bytes(const struct run *run)
{
	const struct core *core = run->core;
	uint64_t most = host_run_bytes(run->mirror->host);
	uint64_t free_bytes = core->options.max_buffer_bytes / 2;

	if (core->options.run_bytes && most > core->options.run_bytes)
		most = core->options.run_bytes;
	/* Units without a reader get half of the memory, and what was asked for will need some of it. */
	free_bytes -= core->asked_bytes < free_bytes ? core->asked_bytes : free_bytes;
	return most < free_bytes ? most : free_bytes;
}

/*
 * Whether a unit may come behind another one. With a reader, it has a request of its own where the
 * host takes one more: two at a time are there sooner. And what has failed comes alone.
 */
static bool may_follow(struct unit *unit, const struct run *run, bool readers_too, uint64_t now_ns)
{
	uint64_t at_ns;

	return unit && unit->state == UNIT_WANTED && link_is_in_list(&unit->in_queue) &&
	       unit->host == run->mirror->host && !unit->rounds &&
	       (readers_too || !unit_reader(unit)) &&
	       mirror_choose(unit, now_ns, &at_ns) == run->mirror;
}

static bool is_coded_and_long(const struct run *run, uint64_t bytes)
{
	const struct source *source = run->mirror->source;
	struct coded_range range;

	if (!source->index)
		return false;
	selection_plan(source->selection, source->index, run->offset, (uint32_t)bytes, &range);
	return bytes > CODED_RUN_BYTES || range.length > CODED_RUN_BYTES;
}

/* Returns how many units it may have. Only the first one has left its queue. */
static unsigned count_units(const struct run *run, struct unit *first, uint64_t now_ns)
{
	struct core *core = run->core;
	const struct host *host = run->mirror->host;
	uint64_t most, bytes = first->length;
	bool readers_too;
	unsigned count = 1;

	if (!host || run->mirror->ops->blocking || run->mirror->alone || first->rounds)
		return 1;
	most = most_bytes(run);
	readers_too = core->busy + 1 >= core->options.max_transfers ||
		      host_is_full(host, URGENCY_DEMAND, core_slots(core, first->source));
	for (; bytes + first->source->unit_bytes <= most; count++) {
		struct unit *unit = unit_find(core, first->source, first->number + count);

		if (!may_follow(unit, run, readers_too, now_ns) ||
		    is_coded_and_long(run, bytes + unit->length))
			break;
		bytes += unit->length;
	}
	return count;
}

static void gather(struct run *run, struct unit *first, uint64_t now_ns)
{
	unsigned count = count_units(run, first, now_ns);

	run->units = &run->only;
	if (count > 1)
		run->units = calloc(count, sizeof(*run->units)) ?: &run->only;
	if (run->units == &run->only)
		count = 1;
	for (unsigned i = 0; i < count; i++) {
		struct unit *unit = i ? unit_find(run->core, first->source, first->number + i) :
					first;

		run->units[i] = unit;
		run->length += unit->length;
		run->demanded |= unit->urgency == URGENCY_DEMAND;
		unit->run = run;
		unit->mirror = run->mirror;
		unit->began_ns = now_ns;
		unit_set(unit, i ? UNIT_ASKED : UNIT_FETCHING);
	}
	run->asked = run->count = count;
}

void run_begin(struct unit *unit, struct mirror *mirror, uint64_t now_ns)
{
	struct core *core = unit->core;
	struct fetch_counts *counts = &core->counts;
	struct run *run = calloc(1, sizeof(*run));

	if (!run) {
		unit_has_no_memory(unit);
		return;
	}
	mirror->recent_ns = now_ns;
	relaxed_add(&counts->attempts, 1);
	if (unit->rounds)
		relaxed_add(&counts->retries, 1);
	run->core = core;
	run->sink = &core_sink;
	run->fetcher = core->fetcher;
	run->mirror = mirror;
	run->offset = unit_extent(unit->source, unit->number).offset;
	run->fresh = unit->cut && unit->tries[mirror->index];
	run->again = unit->rounds || unit->tries[mirror->index];
	run->at = run->offset;
	run->began_ns = now_ns;
	run->news.take = core->take_run;
	/* A host that is being probed is asked for one unit. */
	if (mirror->host) {
		run->given_before = mirror->host->bytes;
		host_begin(mirror->host, now_ns);
	}
	gather(run, unit, now_ns);
	if (mirror->host)
		mirror->host->prefetching += !run->demanded;
	run->widens = !unit->source->codec && unit->source->size <= SOURCE_WHOLE_MAX_BYTES;
	/* What it sends anyway is asked for once, even if others want some of it. */
	if (run->widens && mirror->gives_all && !mirror->alone && !unit->rounds)
		widen(run);
	/* Digests find a response that is too long, and so does decoding. */
	run->sized = run->asked > 1 && !unit->source->has_digests && !unit->source->codec;
	watch(run, now_ns);
	run->deadline_ns = run->count > 1 ? now_ns + RUN_MAX_S * NS_PER_S : run->until_ns;
	unit_expect(arriving(run));
	if (core->visited && !(mirror->ops->ready && mirror->ops->ready(run)))
		list_append(&core->unstarted, &run->unstarted);
	else
		mirror->ops->start(run);
}
