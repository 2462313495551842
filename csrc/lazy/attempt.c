/* SPDX-License-Identifier: MIT */
/* Attempts to fetch a unit: their deadlines, and what follows a failure. */
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "base/relaxed.h"
#include "base/utf8.h"
#include "lazy/core.h"
#include "lazy/layout.h"

enum {
	/*
	 * An attempt leaves time for another one: it gets half of the time where there is another
	 * mirror, else three quarters, since the only one may just be slow. It gets at least this,
	 * or all the time that is left.
	 */
	ATTEMPT_MIN_MS = 500,
	/* The deadline of an attempt whose readers have none. */
	ATTEMPT_MAX_S = 60,
	/*
	 * An attempt that began for nobody, or for a reader with more time, is given up when
	 * nothing arrives for half of the new reader's time, or for this long.
	 */
	SILENT_MAX_S = 5,
	SILENT_MIN_MS = 500,
	/*
	 * The same for an attempt at a cache: so many times as long as 95 of 100 took, within
	 * bounds; the first value while few are known.
	 */
	CACHE_SILENT_MS = 3000,
	CACHE_SILENT_MIN_MS = 2000,
	CACHE_SILENT_MAX_MS = 5000,
	CACHE_SLOWER = 4,
	CACHE_KNOWN_AFTER = 16,
	/* Of those that wait for a slow cache: 4, and 1 of 20; and all after this long. */
	CACHE_SLOW_FIRST = 4,
	CACHE_SLOW_SHARE = 20,
	CACHE_SLOW_MAX_MS = 6000, /* longer than its own time-outs, see site-cache config */
	BACK_OFF_FIRST_MS = 50,	  /* doubled after each failure */
	BACK_OFF_LAST_MS = 5000,
	BUSY_MIN_MS = 100,
	/* A server may ask for days, or send nonsense, while readers wait for it. */
	BUSY_MAX_MS = 5000,
	/*
	 * How long a mirror that has changed is not asked: its object may be put back, and one
	 * response with another identity (such as that of a login proxy) proves nothing. Each
	 * response is checked by identity and digest anyway.
	 */
	CHANGED_MS = 60000,
	CACHE_PAUSE_MS = 100,
};

static void log_unit(const struct unit *unit, const char *name, const struct mirror *mirror,
		     const char *reason, const char *text)
{
	const struct event event = {
		.name = name,
		.source = unit->source,
		.unit = &unit->number,
		.mirror = mirror,
		.host = mirror && mirror->host ? mirror->host->name : NULL,
		.reason = reason,
	};

	event_log(&event, "%s", text);
}

void unit_forget_attempts(struct unit *unit)
{
	unit->out = 0;
	memset(unit->tries, 0, sizeof(unit->tries));
	memset(unit->wrong, 0, sizeof(unit->wrong));
	unit->rounds = 0;
	unit->waited = false;
}

/* Readers without a deadline go on waiting, as if the unit had not been tried. */
static void give_up(struct unit *unit, uint64_t now_ns, const char *why)
{
	log_unit(unit, "given_up", NULL, NULL, why);
	if (unit_fail(unit, -EIO))
		unit_rest(unit, now_ns + BACK_OFF_LAST_MS * NS_PER_MS);
}

/* Whether a failed unit is tried again: as often as its readers' time allows, or a prefetch. */
static bool is_tried_again(const struct unit *unit)
{
	for (struct link *link = unit->subscriptions.next; link != &unit->subscriptions;
	     link = link->next) {
		if (container_of(link, struct subscription, link)->ops->rounds > unit->rounds)
			return true;
	}
	return false;
}

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

static void look_for_progress(struct timer *timer);

static void watch(struct unit *unit, uint64_t at_ns)
{
	unit->progress = unit->fetch.progress;
	unit->timer.expire = look_for_progress;
	timer_set(&unit->core->timers, &unit->timer, at_ns);
}

/* How long an attempt may be silent when its readers wait until `deadline_ns` (0: nobody waits). */
static uint64_t silence_ns(uint64_t deadline_ns, uint64_t now_ns)
{
	uint64_t half_ns = deadline_ns > now_ns ? (deadline_ns - now_ns) / 2 : 0;

	if (!deadline_ns || half_ns > SILENT_MAX_S * NS_PER_S)
		return SILENT_MAX_S * NS_PER_S;
	return half_ns > SILENT_MIN_MS * NS_PER_MS ? half_ns : SILENT_MIN_MS * NS_PER_MS;
}

/* How long a cache may be silent before another one, or the origin, is asked. */
static uint64_t cache_silence_ns(const struct mirror *mirror)
{
	const struct histogram *past = mirror->latency ? &mirror->latency->histogram : NULL;
	uint64_t ns;

	if (!past || histogram_count(past) < CACHE_KNOWN_AFTER)
		return CACHE_SILENT_MS * NS_PER_MS;
	ns = CACHE_SLOWER * histogram_percentile_ns(past, 950);
	if (ns < CACHE_SILENT_MIN_MS * NS_PER_MS)
		return CACHE_SILENT_MIN_MS * NS_PER_MS;
	return ns < CACHE_SILENT_MAX_MS * NS_PER_MS ? ns : CACHE_SILENT_MAX_MS * NS_PER_MS;
}

/*
 * A cache that is silent altogether is given up at once. One that has answered others since is slow,
 * perhaps because its origin is; and if all that wait for it asked the origin, that would be slower
 * still. So only some of them do.
 */
static bool is_given_up(struct unit *unit, uint64_t now_ns)
{
	const struct mirror *mirror = unit->fetch.mirror;
	struct host *host = mirror->host;

	if (!mirror->via || host->answered_ns < unit->began_ns)
		return true;
	unit->slow = true;
	if (unit->began_ns + CACHE_SLOW_MAX_MS * NS_PER_MS <= now_ns)
		return true;
	if (host->given_up >= CACHE_SLOW_FIRST + host->attempts / CACHE_SLOW_SHARE)
		return false;
	host->given_up++;
	return true;
}

static void look_for_progress(struct timer *timer)
{
	struct unit *unit = container_of(timer, struct unit, timer);
	uint64_t now_ns = clock_now_ns();

	if (unit->fetch.progress != unit->progress)
		watch(unit, now_ns + silence_ns(unit_last_deadline_ns(unit), now_ns));
	else if (is_given_up(unit, now_ns))
		unit->fetch.mirror->ops->cancel(&unit->fetch);
	else
		watch(unit, now_ns + cache_silence_ns(unit->fetch.mirror));
}

/* Cancels an attempt whose kind cannot keep the deadline itself. */
static void attempt_is_late(struct timer *timer)
{
	struct unit *unit = container_of(timer, struct unit, timer);

	unit->fetch.mirror->ops->cancel(&unit->fetch);
}

void unit_joined(struct unit *unit, uint64_t deadline_ns)
{
	bool watched = timer_is_set(&unit->timer) && unit->timer.expire == look_for_progress;
	uint64_t now_ns, at_ns;

	/* In the queue of completions, it is over. */
	if (unit->state != UNIT_FETCHING || link_is_in_list(&unit->news.link) ||
	    !unit->fetch.mirror->ops->cancel)
		return;
	/* An attempt that began for a reader with no more time than this ends in time by itself. */
	if (!watched && unit->fetch.deadline_ns <= deadline_ns)
		return;
	now_ns = clock_now_ns();
	at_ns = now_ns + silence_ns(deadline_ns, now_ns);
	/*
	 * For the first reader, silence before it came does not count: the response may be about to
	 * arrive.
	 */
	if (!watched || !unit_reader(unit) || at_ns < unit->timer.at_ns)
		watch(unit, at_ns);
}

static void begin(struct unit *unit, struct mirror *mirror, uint64_t now_ns)
{
	struct fetch_counts *counts = &unit->core->counts;
	struct unit_extent extent = unit_extent(unit->source, unit->number);

	unit->tries[mirror->index]++;
	unit->began_ns = now_ns;
	unit->slow = false;
	mirror->recent_ns = now_ns;
	relaxed_add(&counts->attempts, 1);
	if (unit->rounds)
		relaxed_add(&counts->retries, 1);
	if (mirror->host) {
		host_begin(mirror->host, now_ns);
		mirror->host->prefetching += unit->urgency != URGENCY_DEMAND;
	}
	unit->fetch = (struct fetch){
		.fetcher = unit->core->fetcher,
		.mirror = mirror,
		.offset = extent.offset,
		.length = extent.length,
		.data = unit->data,
		.deadline_ns = attempt_deadline_ns(unit, mirror, now_ns),
		.fresh = unit->cut && unit->tries[mirror->index] > 1,
	};
	unit_set(unit, UNIT_FETCHING);
	if (mirror->via) {
		watch(unit, now_ns + cache_silence_ns(mirror));
	} else if (!unit_reader(unit) && mirror->ops->cancel) {
		watch(unit, now_ns + silence_ns(0, now_ns));
	} else if (mirror->ops->blocking) {
		unit->timer.expire = attempt_is_late;
		timer_set(&unit->core->timers, &unit->timer, unit->fetch.deadline_ns);
	}
	unit_expect(unit);
	mirror->ops->fetch(&unit->fetch);
}

static void rest_for_mirrors(struct unit *unit, uint64_t now_ns, uint64_t at_ns)
{
	const struct source *source = unit->source;

	for (unsigned i = 0; i < source->mirror_count; i++) {
		const struct host *host = source->mirrors[i].host;

		if (host && host_ask(host, now_ns) == BREAKER_OPEN)
			unit->waited = true;
	}
	if (is_tried_again(unit))
		unit_rest(unit, at_ns);
	else
		unit_fail(unit, -EIO);
}

/* The cache may have a unit that no mirror has: one of its look-ups goes on. */
static void rest_for_cache(struct unit *unit, uint64_t now_ns)
{
	if (now_ns - unit->began_ns > BACK_OFF_LAST_MS * NS_PER_MS)
		unit_forget_attempts(unit);
	rest_for_mirrors(unit, now_ns, now_ns + CACHE_PAUSE_MS * NS_PER_MS);
}

/* No mirror can be asked before `at_ns`; UINT64_MAX: none ever. */
static void wait_for_mirrors(struct unit *unit, uint64_t now_ns, uint64_t at_ns)
{
	if (at_ns != UINT64_MAX)
		rest_for_mirrors(unit, now_ns, at_ns);
	else if (unit->core->cache_is_late)
		rest_for_cache(unit, now_ns);
	else
		give_up(unit, now_ns, "no mirror is left to ask");
}

/* Where a unit waits for that mirror; NULL: it rests or fails when it is its turn. */
static struct host *host_of(struct core *core, const struct mirror *mirror)
{
	return mirror && mirror->host ? mirror->host : &core->nowhere;
}

void unit_choose(struct unit *unit, bool first)
{
	uint64_t now_ns = clock_now_ns(), at_ns;
	const struct mirror *mirror = mirror_choose(unit, now_ns, &at_ns);

	/* It would be the first, and needs no memory for this: others may wait for some. */
	if (first && !mirror)
		wait_for_mirrors(unit, now_ns, at_ns);
	else
		unit_queue(unit, host_of(unit->core, mirror), first);
}

void unit_begin(struct unit *unit)
{
	uint64_t now_ns = clock_now_ns(), at_ns;
	/* What is known of mirrors may have changed while it waited. */
	struct mirror *mirror = mirror_choose(unit, now_ns, &at_ns);
	struct host *host = host_of(unit->core, mirror);

	list_remove(&unit->in_queue);
	if (!mirror)
		wait_for_mirrors(unit, now_ns, at_ns);
	else if (host != unit->host)
		unit_queue(unit, host, true);
	else if (unit_allocate(unit))
		begin(unit, mirror, now_ns);
}

static uint64_t back_off_ns(const struct unit *unit)
{
	unsigned doublings = unit->rounds > 7 ? 7 : unit->rounds;
	uint64_t most_ms = (uint64_t)BACK_OFF_FIRST_MS << doublings;
	uint64_t random = 0;

	if (most_ms > BACK_OFF_LAST_MS)
		most_ms = BACK_OFF_LAST_MS;
	/* Full jitter, so that units that failed together do not retry together. */
	if (getrandom(&random, sizeof(random), GRND_NONBLOCK) < 0)
		random = clock_now_ns();
	return (random % most_ms + 1) * NS_PER_MS;
}

static void retry(struct unit *unit)
{
	const struct mirror *mirror = unit->fetch.mirror;
	uint64_t at_ns = clock_now_ns();

	if (!is_tried_again(unit)) {
		unit_fail(unit, -EIO);
		return;
	}
	if (!mirrors_go_on(unit, unit->tries[mirror->index], at_ns))
		at_ns += back_off_ns(unit);
	unit->rounds++;
	unit_rest(unit, at_ns);
}

/* Has the units that wait for it choose again, where it is worse than it was. */
static void is_worse(const struct unit *unit, const struct mirror *mirror)
{
	if (mirror->host)
		units_choose_again(unit->core, mirror->host);
}

static void count_bad(const struct unit *unit, struct mirror *mirror)
{
	mirror->recent_ns = clock_now_ns();
	if (++mirror->bad_in_a_row == UNHEALTHY_FAILURES)
		is_worse(unit, mirror);
}

/*
 * Counts a wrong response. The mirror is asked again at first, because the fault may be on the way
 * to us.
 */
static void count_wrong(struct unit *unit, struct mirror *mirror)
{
	count_bad(unit, mirror);
	if (++unit->wrong[mirror->index] >= WRONG_ANSWERS_MAX)
		unit->out |= 1u << mirror->index;
}

static void set_changed(struct unit *unit, struct mirror *mirror, const char *why)
{
	const struct core_options *options = &unit->core->options;

	if (!mirror->changed_until_ns) {
		event_log(
			&(struct event){ .name = "mirror_changed",
					 .source = unit->source,
					 .mirror = mirror,
					 .host = mirror->host ? mirror->host->name : NULL },
			"it is not asked for a while, because its object is not the pinned one: %s",
			why);
		is_worse(unit, mirror);
	}
	mirror->changed_until_ns = clock_now_ns() + (options->changed_ms ?: CHANGED_MS) * NS_PER_MS;
}

static void avoid(struct unit *unit, struct mirror *mirror, uint32_t wait_ms, uint64_t now_ns)
{
	if (wait_ms < BUSY_MIN_MS)
		wait_ms = BUSY_MIN_MS;
	if (wait_ms > BUSY_MAX_MS)
		wait_ms = BUSY_MAX_MS;
	if (mirror->avoid_until_ns <= now_ns)
		is_worse(unit, mirror);
	mirror->avoid_until_ns = now_ns + wait_ms * NS_PER_MS;
}

/* What makes one slow, the others wait for as well. */
static void leave_caches(struct unit *unit)
{
	const struct source *source = unit->source;

	for (unsigned i = source->mirror_count; i < source->place_count; i++)
		unit->out |= 1u << i;
}

static void handle_failure(struct unit *unit)
{
	struct fetch *fetch = &unit->fetch;
	struct mirror *mirror = fetch->mirror;
	struct host *host = mirror->host;
	uint64_t now_ns = clock_now_ns();

	relaxed_add(&unit->core->counts.failures[fetch->failure], 1);
	if (unit->slow)
		leave_caches(unit);
	if (host && (fetch->failure != FETCH_TRANSIENT || unit->slow))
		host_ended(host);
	else if (host && host_failed(host, now_ns))
		is_worse(unit, mirror);
	switch (fetch->failure) {
	case FETCH_TRANSIENT:
		break;
	case FETCH_BUSY:
		avoid(unit, mirror, fetch->retry_after_ms, now_ns);
		break;
	case FETCH_NO_LOGIN:
		count_bad(unit, mirror);
		break;
	case FETCH_DENIED:
	case FETCH_GONE:
		count_bad(unit, mirror);
		unit->out |= 1u << mirror->index;
		break;
	case FETCH_ABSENT:
		unit->out |= 1u << mirror->index;
		break;
	case FETCH_CHANGED:
		set_changed(unit, mirror, fetch->error.text);
		break;
	case FETCH_WRONG:
		count_wrong(unit, mirror);
		break;
	}
}

/* NB: from here on, nobody cancels it: its kind has no data of it any more. */
void fetch_done(struct fetch *fetch)
{
	struct unit *unit = container_of(fetch, struct unit, fetch);

	if (fetch->coded) {
		coded_arrived(fetch);
		return;
	}
	timer_clear(&unit->timer);
	unit->data = fetch->data; /* a kind may have put its own there */
	completion_put(unit->core, &unit->news);
}

static void drop_identity(struct unit *unit)
{
	free(unit->fetch.identity);
	unit->fetch.identity = NULL;
}

static void fetch_succeeded(struct unit *unit)
{
	const struct mirror *mirror = unit->fetch.mirror;
	struct fetch_counts *counts = &unit->core->counts;

	relaxed_add(&counts->units_fetched, 1);
	relaxed_add(&counts->bytes_fetched, unit->length);
	if (mirror->host) {
		host_succeeded(mirror->host, unit->length);
		mirror->host->answered_ns = clock_now_ns();
	}
	if (mirror->latency)
		histogram_add(&mirror->latency->histogram, clock_now_ns() - unit->began_ns, 1);
	unit_verify(unit);
}

void unit_attempt_over(struct unit *unit)
{
	struct fetch *fetch = &unit->fetch;
	struct host *host = fetch->mirror->host;

	if (host) {
		host->prefetching -= unit->urgency != URGENCY_DEMAND;
		host_is_ready(unit->core, host);
	}
	unit->cut |= fetch->cut;
	if (!fetch->result) {
		fetch_succeeded(unit);
		return;
	}
	drop_identity(unit);
	if (unit->core->ending) {
		if (host)
			host_ended(host);
		unit_set(unit, UNIT_WANTED);
		return;
	}
	log_unit(unit, "fetch_failed", fetch->mirror, fetch_failure_name(fetch->failure),
		 *fetch->error.text ? fetch->error.text : strerror(-fetch->result));
	handle_failure(unit);
	retry(unit);
}

void unit_refuse(struct unit *unit)
{
	struct mirror *mirror = unit->fetch.mirror;
	struct fetch_counts *counts = &unit->core->counts;
	int err = unit->check.err;

	drop_identity(unit);
	if (err == -EBADMSG) {
		relaxed_add(&counts->wrong_digests, 1);
		count_wrong(unit, mirror);
		log_unit(unit, "wrong_digest", mirror, NULL, "wrong content (SHA-256)");
	} else if (err == -ESTALE) {
		relaxed_add(&counts->failures[FETCH_CHANGED], 1);
		set_changed(unit, mirror, "another one was pinned at the same time");
	} else {
		relaxed_add(&counts->local_failures, 1);
		log_unit(unit, "not_checked", NULL, NULL, strerror(-err));
		/*
		 * Fetching it again would not free space on the map's disk, so readers with a
		 * deadline get the error now. A lack of memory may be over in a moment.
		 */
		if (err != -ENOMEM) {
			give_up(unit, clock_now_ns(), "the map cannot be written");
			return;
		}
	}
	retry(unit);
}

void unit_accept(struct unit *unit)
{
	struct fetch *fetch = &unit->fetch;
	struct mirror *mirror = fetch->mirror;
	struct fetch_counts *counts = &unit->core->counts;

	if (fetch->identity && mirror->identity && strcmp(fetch->identity, mirror->identity) != 0) {
		unit->check.err = -ESTALE;
		unit_refuse(unit);
		return;
	}
	if (!mirror->identity)
		mirror->identity = fetch->identity;
	else
		free(fetch->identity);
	fetch->identity = NULL;
	/* Not for a fetch that was already running when another one found the change. */
	if (clock_now_ns() >= mirror->changed_until_ns)
		mirror->changed_until_ns = 0;
	mirror->bad_in_a_row = 0;
	if (unit->check.known)
		relaxed_add(&counts->units_verified, 1);
	if (unit->check.pinned)
		relaxed_add(&counts->units_pinned, 1);
	if (unit->urgency != URGENCY_DEMAND)
		relaxed_add(&counts->units_prefetched, 1);
	unit_right(unit, false);
}

void fetch_failed(struct fetch *fetch, int err, enum fetch_failure failure, const char *format, ...)
{
	va_list args;

	va_start(args, format);
	vsnprintf(fetch->error.text, sizeof(fetch->error.text), format, args);
	va_end(args);
	utf8_repair(fetch->error.text);
	fetch->result = err;
	fetch->failure = failure;
	fetch_done(fetch);
}
