/* SPDX-License-Identifier: MIT */
/* Which units become one request, what arrives of it, and how long it is waited for. */
#include "lazy/run.h"

#include <errno.h>
#include <openssl/evp.h>
#include <stdlib.h>
#include <string.h>

#include "base/relaxed.h"
#include "lazy/core.h"
#include "lazy/identity.h"
#include "lazy/layout.h"
#include "lazy/selection.h"

enum {
	/*
	 * An attempt leaves time for another one: it gets half of the time where there is another
	 * mirror, else three quarters, since the only one may just be slow. It gets at least this,
	 * or all the time that is left.
	 */
	ATTEMPT_MIN_MS = 500,
	/* The deadline of an attempt whose readers have none. */
	ATTEMPT_MAX_S = 60,
	/* What a kind is told for several units: each of them has a deadline here. */
	RUN_MAX_S = 900,
	/*
	 * An attempt that began for nobody, or for a reader with more time, is given up when
	 * nothing arrives for half of the new reader's time, or for this long.
	 */
	SILENT_MAX_S = 5,
	SILENT_MIN_MS = 500,
	/*
	 * The same for an attempt at a cache, and for the first one of a unit at one of several
	 * mirrors: so many times as long as 95 of 100 took, within bounds; the first value while
	 * few are known.
	 */
	CACHE_SILENT_MS = 2500,
	CACHE_SILENT_MIN_MS = 2500, /* longer than the time-outs of a site cache */
	CACHE_SILENT_MAX_MS = 5000,
	CACHE_SLOWER = 4,
	CACHE_KNOWN_AFTER = 16,
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

/* Those from `index` on shall be fetched otherwise, if somebody wants them. */
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
	for (unsigned i = run->next + 1; run->demanded && i < run->count; i++) {
		if (unit_reader(run->units[i]) && is_far_ahead(run, i, now_ns))
			leave_from(run, i);
	}
}

/* How long. */

/* When an attempt for that unit at that mirror should have ended. */
static uint64_t attempt_deadline_ns(const struct unit *unit, const struct mirror *mirror,
				    uint64_t now_ns)
{
	uint64_t last_ns = unit_last_deadline_ns(unit);
	uint64_t left_ns, share_ns;

	if (!last_ns || last_ns == FETCHER_NO_DEADLINE)
		return now_ns + ATTEMPT_MAX_S * NS_PER_S;
	left_ns = last_ns > now_ns ? last_ns - now_ns : 0;
	share_ns = mirror_has_other(unit, mirror, now_ns) ? left_ns / 2 : left_ns / 4 * 3;
	if (share_ns < ATTEMPT_MIN_MS * NS_PER_MS)
		share_ns = ATTEMPT_MIN_MS * NS_PER_MS;
	return now_ns + (left_ns < share_ns ? left_ns : share_ns);
}

/* How long an attempt may be silent when its readers wait until `deadline_ns` (0: nobody waits). */
static uint64_t silence_ns(const struct run *run, uint64_t deadline_ns, uint64_t now_ns)
{
	uint64_t half_ns = deadline_ns > now_ns ? (deadline_ns - now_ns) / 2 : 0;

	if (!deadline_ns && run->core->options.silent_ms)
		return run->core->options.silent_ms * NS_PER_MS;
	if (!deadline_ns || half_ns > SILENT_MAX_S * NS_PER_S)
		return SILENT_MAX_S * NS_PER_S;
	return half_ns > SILENT_MIN_MS * NS_PER_MS ? half_ns : SILENT_MIN_MS * NS_PER_MS;
}

static void look_for_progress(struct timer *timer);

static void watch_silence(struct run *run, uint64_t since_ns, uint64_t at_ns)
{
	run->progress_seen = run->progress;
	run->watched_ns = since_ns;
	run->timer.expire = look_for_progress;
	timer_set(&run->core->timers, &run->timer, at_ns);
}

/* The latest deadline of all its readers. */
static uint64_t last_deadline_ns(const struct run *run)
{
	uint64_t last_ns = 0;

	for (unsigned i = run->next; i < run->count; i++) {
		uint64_t its_ns = unit_last_deadline_ns(run->units[i]);

		if (its_ns > last_ns)
			last_ns = its_ns;
	}
	return last_ns;
}

/* How long a cache or mirror may be silent before another place is asked. */
static uint64_t first_silence_ns(const struct run *run)
{
	const struct latency *latency = run->mirror->latency;
	const struct histogram *past = latency ? &latency->histogram : NULL;
	uint64_t ns;

	if (run->core->options.silent_ms)
		return run->core->options.silent_ms * NS_PER_MS;
	if (!past || histogram_count(past) < CACHE_KNOWN_AFTER)
		return CACHE_SILENT_MS * NS_PER_MS;
	ns = CACHE_SLOWER * histogram_percentile_ns(past, 950);
	if (ns < CACHE_SILENT_MIN_MS * NS_PER_MS)
		return CACHE_SILENT_MIN_MS * NS_PER_MS;
	return ns < CACHE_SILENT_MAX_MS * NS_PER_MS ? ns : CACHE_SILENT_MAX_MS * NS_PER_MS;
}

/* Whether there are other mirrors, and the unit has not been tried at one yet. */
static bool has_second(const struct run *run, uint64_t now_ns)
{
	const struct unit *unit = arriving(run);

	return !unit->rounds && unit_reader(unit) && mirror_has_other(unit, run->mirror, now_ns);
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
		run->slow = has_second(run, now_ns);
		return true;
	}
	if (now_ns >= host->answered_ns + first_silence_ns(run))
		return true;
	if (run->began_ns + CACHE_SLOW_MAX_MS * NS_PER_MS > now_ns)
		return false;
	/* NB: one that waits on, and fails later, fails as any other. */
	run->slow = true;
	return true;
}

/* When a run that has got something will have been silent for too long. */
static uint64_t silent_at_ns(const struct run *run, uint64_t now_ns)
{
	/* What came before the timer was set, or is not decoded yet, says less. */
	uint64_t since_ns = run->last_ns ?: now_ns, at_ns;

	at_ns = since_ns + (run->mirror->via ? first_silence_ns(run) :
					       silence_ns(run, last_deadline_ns(run), now_ns));
	return at_ns > now_ns ? at_ns : now_ns;
}

static void look_for_progress(struct timer *timer)
{
	struct run *run = container_of(timer, struct run, timer);
	uint64_t now_ns = clock_now_ns();
	/* What was before the request went out is nobody's silence. */
	uint64_t since_ns = run->held ? now_ns : run->began_ns;

	if (since_ns > run->watched_ns && now_ns < run->until_ns) {
		uint64_t at_ns = since_ns + first_silence_ns(run);

		watch_silence(run, since_ns, at_ns < run->until_ns ? at_ns : run->until_ns);
	} else if (run->progress != run->progress_seen &&
		   (run->asked == 1 || now_ns < run->until_ns)) {
		split(run, now_ns);
		watch_silence(run, now_ns, silent_at_ns(run, now_ns));
	} else if (run->progress != run->progress_seen) {
		run_cancel(run);
	} else if (is_given_up(run, now_ns)) {
		/* NB: the others that wait for it have waited as long, and must not wait again. */
		run->silent = run->mirror->via && !run->slow;
		run_cancel(run);
	} else {
		watch_silence(run, now_ns, run->mirror->host->answered_ns + first_silence_ns(run));
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
	run->until_ns = attempt_deadline_ns(unit, run->mirror, now_ns);
	if (run->mirror->via || (ops->cancel && !ops->blocking && has_second(run, now_ns))) {
		uint64_t at_ns = now_ns + first_silence_ns(run);

		/* Readers may have less time than that, and another place something of it. */
		watch_silence(run, now_ns, at_ns < run->until_ns ? at_ns : run->until_ns);
	} else if (!unit_reader(unit) && ops->cancel) {
		uint64_t last_ns = run->demanded ? last_deadline_ns(run) : 0;

		watch_silence(run, now_ns, now_ns + silence_ns(run, last_ns, now_ns));
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
	at_ns = now_ns + silence_ns(run, deadline_ns, now_ns);
	/*
	 * For the first reader, silence before it came does not count: the response may be about to
	 * arrive.
	 */
	if (!watched || !has_reader(run) || at_ns < run->timer.at_ns)
		watch_silence(run, now_ns, at_ns);
}

void run_cancel(struct run *run)
{
	if (!run->is_over && run->mirror->ops->cancel)
		run->mirror->ops->cancel(run);
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
	data = unit_make_room(unit) ? malloc(unit->length) : NULL;
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

static int space(struct run *run, struct iovec *parts, int room)
{
	size_t bytes = 0;
	int count = 0;

	/* NB: units may leave while room is made for one. */
	for (unsigned i = run->next; i < run->count && count < room && bytes < PLACES_BYTES; i++) {
		struct unit *unit = run->units[i];
		uint32_t filled = i == run->next ? run->filled : 0;

		if (!has_memory(unit) || i >= run->count)
			break;
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
		unit_set(arriving(run), UNIT_FETCHING);
		unit_expect(arriving(run));
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

static const struct run_sink core_sink = {
	.space = space,
	.take = take,
	.take_all = take_all,
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
	/* What nobody waits for gets half of the memory, and what was asked for arrives one day. */
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

/* Returns how many units it may have, of which only the first has left its queue. */
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
	run->began_ns = now_ns;
	run->news.take = core->take_run;
	/* A host that is being probed is asked for one unit. */
	if (mirror->host)
		host_begin(mirror->host, now_ns);
	gather(run, unit, now_ns);
	/* Digests say what is right, and what is decoded is so as a whole. */
	run->sized = run->asked > 1 && !unit->source->has_digests && !unit->source->codec;
	if (mirror->host)
		mirror->host->prefetching += !run->demanded;
	watch(run, now_ns);
	run->deadline_ns = run->count > 1 ? now_ns + RUN_MAX_S * NS_PER_S : run->until_ns;
	unit_expect(unit);
	mirror->ops->start(run);
}
