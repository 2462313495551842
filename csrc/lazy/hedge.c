/* SPDX-License-Identifier: MIT */
/*
 * Hedges: second requests for units that readers wait for, to another mirror or cache, where the
 * first one has not begun its response after the time that 95 of 100 take. What is whole and right
 * first is delivered, and the other request is cancelled. Each ordinary request earns a twentieth of
 * a hedge, from the first one on, so that they cannot become many when everything is slow.
 */
#include <errno.h>
#include <openssl/evp.h>
#include <stdlib.h>
#include <string.h>

#include "base/relaxed.h"
#include "lazy/core.h"
#include "lazy/layout.h"
#include "lazy/run.h"
#include "lazy/store.h"

enum {
	/* When a response should have begun: within these bounds; and as long as few are known. */
	DELAY_MIN_MS = 5,
	DELAY_MAX_MS = 1000,
	DELAY_UNKNOWN_MS = 500,
	KNOWN_AFTER = 16,
	/* Where no hedge was possible, one may be after this time. */
	AGAIN_MS = 100,
};

struct hedge {
	struct run run;
	struct unit *unit; /* which it holds */
	uint8_t *data;
	uint32_t filled;
	bool lost; /* it is not needed any more */
	struct pool_job job;
	struct unit_check check;
};

static struct hedge *hedge_of(struct run *run)
{
	return container_of(run, struct hedge, run);
}

static int space(struct run *run, struct iovec *parts, int room)
{
	const struct hedge *hedge = hedge_of(run);

	(void)room;
	parts->iov_base = hedge->data + hedge->filled;
	parts->iov_len = run->length - hedge->filled;
	return parts->iov_len ? 1 : 0;
}

static void take(struct run *run, size_t bytes)
{
	if (!run->arrived_bytes) {
		run->first_ns = clock_now_ns();
		histogram_add(&run->mirror->host->first_byte, run->first_ns - run->began_ns, 1);
	}
	run->arrived_bytes += bytes;
	hedge_of(run)->filled += (uint32_t)bytes;
}

static void over(struct run *run)
{
	run->is_over = true;
	completion_put(run->core, &run->news);
}

/* NB: no kind that blocks is asked, so there is no take_all(). */
static const struct run_sink hedge_sink = { .space = space, .take = take, .over = over };

static void hedge_free(struct hedge *hedge)
{
	struct unit *unit = hedge->unit;

	if (hedge->data)
		relaxed_add(&unit->core->counts.buffer_bytes, -(uint64_t)unit->length);
	unit->hedge = NULL;
	unit->holds--;
	unit_let_go(unit);
	free(hedge->data);
	free(hedge->run.identity);
	free(hedge);
}

/* Whether the unit still lacks what the hedge asks for. */
static bool is_open(const struct unit *unit)
{
	return unit->state == UNIT_WANTED || unit->state == UNIT_RESTING ||
	       ((unit->state == UNIT_ASKED || unit->state == UNIT_FETCHING) && unit->run);
}

/* The unit goes on with what the hedge has got, and its other request without the unit. */
static void win(struct hedge *hedge)
{
	struct unit *unit = hedge->unit;
	struct fetch_counts *counts = &unit->core->counts;

	if (unit->run)
		run_lose(unit);
	unit_reserve(unit, hedge->data);
	hedge->data = NULL;
	relaxed_add(&counts->buffer_bytes, -(uint64_t)unit->length);
	relaxed_add(&counts->hedges_won, 1);
	relaxed_add(&counts->units_fetched, 1);
	relaxed_add(&counts->bytes_fetched, unit->length);
	unit_set(unit, UNIT_FETCHING);
	unit->mirror = hedge->run.mirror;
	unit->suspect = run_suspect(&hedge->run);
	unit->check = (struct unit_check){ .hashed = hedge->check.hashed };
	memcpy(unit->check.digest, hedge->check.digest, sizeof(unit->check.digest));
	run_identify(&hedge->run, unit);
	completion_put(unit->core, &unit->news);
}

/* Without a known digest, the first content that is whole is pinned. */
static void check(struct pool_job *job)
{
	struct hedge *hedge = container_of(job, struct hedge, job);
	const struct unit *unit = hedge->unit;
	uint8_t expected[SOURCE_DIGEST_BYTES];
	int known = store_digest(unit->core->store, unit->source, unit->number, expected);

	hedge->check.hashed = EVP_Digest(hedge->data, unit->length, hedge->check.digest, NULL,
					 unit->core->sha256, NULL);
	if (known > 0 && hedge->check.hashed &&
	    memcmp(hedge->check.digest, expected, sizeof(expected)) != 0)
		hedge->check.err = -EBADMSG;
}

static void checked(struct pool_job *job)
{
	struct hedge *hedge = container_of(job, struct hedge, job);

	if (hedge->check.err)
		unit_count_wrong(hedge->unit, hedge->run.mirror, run_suspect(&hedge->run));
	else if (!hedge->lost && is_open(hedge->unit))
		win(hedge);
	hedge_free(hedge);
}

static void note_answer(const struct run *run)
{
	struct host *host = run->mirror->host;
	uint64_t now_ns = clock_now_ns();

	host_ended(host);
	host_gave(host, run->length);
	host_measure(host, run->first_ns - run->began_ns, now_ns - run->began_ns, run->length);
	host->answered_ns = now_ns;
}

static void take_news(struct core *core, struct completion *completion)
{
	struct run *run = container_of(completion, struct run, news);
	struct hedge *hedge = hedge_of(run);

	if (!run->is_over) {
		run_cancel(run);
		return;
	}
	host_is_ready(core, run->mirror->host);
	if (!run->result)
		relaxed_add(&core->counts.coded_bytes_fetched, run->coded_bytes);
	if (!run->result)
		note_answer(run);
	else if (hedge->lost || run->yields)
		host_ended(run->mirror->host);
	else
		attempt_note(run, hedge->unit);
	if (run->result && run->failure == FETCH_LATER && hedge->unit->tries[run->mirror->index])
		hedge->unit->tries[run->mirror->index]--;
	if (run->result || hedge->lost || !is_open(hedge->unit)) {
		hedge_free(hedge);
	} else if (core->store) {
		hedge->job.work = check;
		hedge->job.done = checked;
		core_submit(core, &hedge->job);
	} else {
		win(hedge);
		hedge_free(hedge);
	}
}

const struct mirror *hedge_mirror(const struct unit *unit)
{
	return unit->hedge && !unit->hedge->lost ? unit->hedge->run.mirror : NULL;
}

void hedge_end(struct unit *unit)
{
	struct hedge *hedge = unit->hedge;

	if (!hedge || hedge->lost)
		return;
	hedge->lost = true;
	if (!hedge->run.is_over)
		completion_put(unit->core, &hedge->run.news);
}

/* Returns false when there is no memory. */
static bool allocate(struct unit *unit)
{
	struct hedge *hedge = unit_make_room(unit) ? calloc(1, sizeof(*hedge)) : NULL;
	uint8_t *data = hedge ? malloc(unit->length) : NULL;

	if (!data) {
		free(hedge);
		return false;
	}
	relaxed_add(&unit->core->counts.buffer_bytes, unit->length);
	hedge->data = data;
	hedge->unit = unit;
	unit->hedge = hedge;
	unit->holds++;
	return true;
}

static void begin(struct unit *unit, uint64_t now_ns)
{
	struct core *core = unit->core;
	struct mirror *mirror = mirror_beside(unit, unit->mirror, now_ns);
	struct run *run;

	if (!mirror || !allocate(unit))
		return;
	core->hedge_credit -= HEDGE_COST;
	relaxed_add(&core->counts.hedges, 1);
	relaxed_add(&core->counts.attempts, 1);
	mirror->recent_ns = now_ns;
	unit->tries[mirror->index]++;
	host_begin(mirror->host, now_ns);
	run = &unit->hedge->run;
	run->core = core;
	run->sink = &hedge_sink;
	run->fetcher = core->fetcher;
	run->mirror = mirror;
	run->without = mirror->via ? host_without(mirror->host, now_ns) : 0;
	run->offset = unit_extent(unit->source, unit->number).offset;
	run->length = unit->length;
	run->deadline_ns = attempt_deadline_ns(unit, mirror, now_ns);
	run->began_ns = now_ns;
	run->units = &run->only;
	run->only = unit;
	run->asked = run->count = 1;
	run->news.take = take_news;
	mirror->ops->start(run);
}

static uint64_t delay_ns(const struct core *core, const struct host *host)
{
	uint64_t ns;

	if (core->options.hedge_ms)
		return core->options.hedge_ms * NS_PER_MS;
	if (histogram_count(&host->first_byte) < KNOWN_AFTER)
		return DELAY_UNKNOWN_MS * NS_PER_MS;
	ns = histogram_percentile_ns(&host->first_byte, 950);
	if (ns < DELAY_MIN_MS * NS_PER_MS)
		return DELAY_MIN_MS * NS_PER_MS;
	return ns < DELAY_MAX_MS * NS_PER_MS ? ns : DELAY_MAX_MS * NS_PER_MS;
}

static void is_due(struct core *core, struct completion *completion)
{
	struct run *run = container_of(completion, struct run, hedge_news);
	const struct host *host = run->mirror->host;
	uint64_t now_ns = clock_now_ns(), at_ns = run->began_ns + delay_ns(core, host);

	if (run->is_over || run->progress || core->ending)
		return;
	if (run->held || now_ns < at_ns) {
		timer_set(&core->timers, &run->hedge_timer,
			  run->held ? now_ns + AGAIN_MS * NS_PER_MS : at_ns);
		return;
	}
	/* A hedge has shown that it is silent: what has waited there since is asked of others. */
	if (host->overtaken && host->answered_ns < run->began_ns &&
	    run->began_ns < host->overtaken_ns && run->next < run->count &&
	    mirror_beside(run->units[run->next], run->mirror, now_ns)) {
		run->overtaken = true;
		run_cancel(run);
		return;
	}
	for (unsigned i = run->next; i < run->count; i++) {
		struct unit *unit = run->units[i];

		/* What a cache has asked to wait for, others have not sooner. */
		if (core->hedge_credit >= HEDGE_COST && !unit->hedge && !unit->later_ns &&
		    unit_reader(unit))
			begin(unit, now_ns);
	}
	timer_set(&core->timers, &run->hedge_timer, now_ns + AGAIN_MS * NS_PER_MS);
}

static void has_expired(struct timer *timer)
{
	struct run *run = container_of(timer, struct run, hedge_timer);

	completion_put(run->core, &run->hedge_news);
}

void hedge_watch(struct run *run, uint64_t now_ns)
{
	const struct mirror *mirror = run->mirror;
	uint64_t at_ns;

	if (mirror->source->place_count == 1 || !mirror->host || mirror->ops->blocking ||
	    !mirror->ops->cancel || run->progress || timer_is_set(&run->hedge_timer))
		return;
	at_ns = run->began_ns + delay_ns(run->core, mirror->host);
	run->hedge_timer.expire = has_expired;
	run->hedge_news.take = is_due;
	timer_set(&run->core->timers, &run->hedge_timer, at_ns > now_ns ? at_ns : now_ns);
}
