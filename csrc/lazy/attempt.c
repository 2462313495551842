/* SPDX-License-Identifier: MIT */
/* Attempts to fetch a unit, and what follows a failure. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/relaxed.h"
#include "content/identity.h"
#include "lazy/core.h"
#include "lazy/run.h"

enum {
	BUSY_MIN_MS = 100,
	/*
	 * A server may ask for days, or send nonsense, while readers wait for it: only readers without
	 * a deadline wait for longer than this; see busy_ns().
	 */
	BUSY_MAX_MS = 5000,
	BUSY_PATIENT_MS = 60000, /* the same of readers without a deadline */
	/*
	 * How long a mirror that has changed is not asked: its object may be put back, and one
	 * response with another identity (such as that of a login proxy) proves nothing. Each
	 * response is checked by identity and digest anyway.
	 */
	CHANGED_MS = 60000,
	/* After how long a server is asked again that says for the first time that it has changed. */
	DOUBT_MS = 500,
	/*
	 * A cache that says "later" at once, unlike a site cache, does not wait for what it gets: the
	 * next request to it waits some of this first. After LATER_MAX_MS, the origin is asked.
	 */
	LATER_SOON_MS = 200,
	LATER_PAUSE_MS = 200,
	LATER_MAX_MS = 6000,
	/* A site cache has slices of a multiple of it. */
	SLICE_MIN_BYTES = 4096,
};

/* Has the units that wait for it choose again, where it is worse than it was. */
static void requeue_waiting_units(const struct unit *unit, const struct mirror *mirror)
{
	if (mirror->host)
		units_choose_again(unit->core, mirror->host);
}

static void count_bad(const struct unit *unit, struct mirror *mirror)
{
	mirror->recent_ns = clock_now_ns();
	if (++mirror->bad_in_a_row == UNHEALTHY_FAILURES)
		requeue_waiting_units(unit, mirror);
}

/*
 * Counts a wrong response. The mirror is asked again at first, because the fault may be on the way
 * to us.
 */
static void count_wrong(struct unit *unit, const struct mirror *mirror)
{
	if (++unit->wrong[mirror->index] >= WRONG_ANSWERS_MAX)
		unit->out |= 1u << mirror->index;
}

static void set_changed(const struct unit *unit, struct mirror *mirror, const char *why)
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
		requeue_waiting_units(unit, mirror);
	}
	mirror->changed_until_ns = clock_now_ns() + (options->changed_ms ?: CHANGED_MS) * NS_PER_MS;
}

/*
 * How long a busy server is left alone: as long as it asks for, but at most BUSY_MAX_MS, or until a
 * quarter of the readers' time is left where that is later, as it may be well again.
 */
static uint64_t busy_ns(const struct unit *unit, uint32_t asked_ms, uint64_t now_ns)
{
	uint64_t asked_ns = (asked_ms < BUSY_MIN_MS ? BUSY_MIN_MS : asked_ms) * NS_PER_MS;
	uint64_t most_ns = BUSY_MAX_MS * NS_PER_MS, last_ns = unit_last_deadline_ns(unit);
	uint64_t left_ns = last_ns > now_ns ? last_ns - now_ns : 0;

	if (last_ns == FETCHER_NO_DEADLINE)
		most_ns = BUSY_PATIENT_MS * NS_PER_MS;
	else if (left_ns / 4 * 3 > most_ns)
		most_ns = left_ns / 4 * 3;
	return asked_ns < most_ns ? asked_ns : most_ns;
}

static void avoid(const struct unit *unit, struct mirror *mirror, uint32_t asked_ms,
		  uint64_t now_ns)
{
	uint64_t until_ns = now_ns + busy_ns(unit, asked_ms, now_ns);

	if (mirror->avoid_until_ns <= now_ns)
		requeue_waiting_units(unit, mirror);
	/* NB: a prefetch, which waits for less, may be told after a reader. */
	if (mirror->avoid_until_ns < until_ns)
		mirror->avoid_until_ns = until_ns;
}

static void forget_doubt(struct mirror *mirror)
{
	free(mirror->doubted);
	mirror->doubted = NULL;
}

/*
 * Whether a server is asked once more, a little later, before its object counts as changed: one
 * answer may be that of a proxy, or of a server that is starting. The change is believed if the
 * server says the same again, and has not been right meanwhile.
 */
static bool doubt_change(const struct unit *unit, struct mirror *mirror, uint64_t began_ns,
			 const char *why)
{
	uint64_t now_ns = clock_now_ns();

	if (mirror->ops->blocking || mirror->via || mirror->changed_until_ns)
		return false;
	/* NB: what was asked before says nothing of what it says later. */
	if (mirror->doubted && began_ns <= mirror->doubted_ns)
		return true;
	if (mirror->doubted && !strcmp(mirror->doubted, why))
		return false;
	forget_doubt(mirror);
	mirror->doubted = strdup(why);
	mirror->doubted_ns = now_ns;
	avoid(unit, mirror, DOUBT_MS, now_ns);
	return mirror->doubted;
}

/* What makes one slow, the others wait for as well. */
static void leave_caches(struct unit *unit)
{
	const struct source *source = unit->source;

	for (unsigned i = source->mirror_count; i < source->place_count; i++)
		unit->out |= 1u << i;
}

/* What the failure says of host and mirror; `unit` is one of the run. */
static void note_failure(const struct run *run, const struct unit *unit)
{
	struct mirror *mirror = run->mirror;
	struct host *host = mirror->host;
	uint64_t now_ns = clock_now_ns();
	bool doubted = run->failure == FETCH_CHANGED &&
		       doubt_change(unit, mirror, run->began_ns, run->error.text);

	relaxed_add(&run->core->counts.failures[doubted ? FETCH_TRANSIENT : run->failure], 1);
	if (host && (run->failure != FETCH_TRANSIENT || run->slow || run->local_failure))
		host_ended(host);
	else if (host && host_failed(host, now_ns))
		requeue_waiting_units(unit, mirror);
	if (host && run->silent) {
		host->silent = true;
		requeue_waiting_units(unit, mirror);
	}
	if (host && run->arrived_bytes && run->asked > 1 && run->failure != FETCH_LATER)
		host_cut(host);
	switch (run->failure) {
	case FETCH_TRANSIENT:
		break;
	case FETCH_BUSY:
		avoid(unit, mirror, run->retry_after_ms, now_ns);
		break;
	case FETCH_ABSENT:
		break;
	case FETCH_LATER:
		if (host)
			host->answered_ns = now_ns;
		break;
	case FETCH_CHANGED:
		if (!doubted)
			set_changed(unit, mirror, run->error.text);
		break;
	case FETCH_NO_LOGIN:
	case FETCH_DENIED:
	case FETCH_GONE:
	case FETCH_WRONG:
		count_bad(unit, mirror);
		break;
	}
}

/* Has a unit remember what a failed run says. */
static void remember(const struct run *run, struct unit *unit)
{
	unsigned index = run->mirror->index;

	unit->cut |= run->cut;
	if (run->mirror->via && (run->slow || run->result == -EBADMSG))
		leave_caches(unit);
	if (run->failure == FETCH_WRONG)
		count_wrong(unit, run->mirror);
	if (run->failure == FETCH_ABSENT)
		unit->out |= 1u << index;
	/* It may have been refused for its neighbours' sake, and comes alone now. */
	if (run->asked == 1 && (run->failure == FETCH_DENIED || run->failure == FETCH_GONE))
		unit->out |= 1u << index;
}

/* Has a unit answer for the failure of its run. */
static void charge(const struct run *run, struct unit *unit)
{
	unit->run = NULL;
	remember(run, unit);
	unit->tries[run->mirror->index]++;
	unit_retry(unit);
}

static void log_failure(const struct run *run, const struct unit *unit)
{
	unit_log(unit, "fetch_failed", run->mirror, fetch_failure_name(run->failure),
		 *run->error.text ? run->error.text : strerror(-run->result));
}

/*
 * A site cache that lacks the next slice of several ends its response, as it has no status to say
 * that with. A server that dies hardly ever does so there.
 */
static bool is_between_slices(const struct run *run)
{
	return run->failure == FETCH_TRANSIENT && run->mirror->via && run->cut &&
	       run->arrived_bytes && (run->offset + run->arrived_bytes) % SLICE_MIN_BYTES == 0;
}

/* Has the unit ask the cache again, which is getting it, without a charge; or its origin. */
static void ask_later(const struct run *run, struct unit *unit)
{
	uint64_t now_ns = clock_now_ns(), waited_ns = now_ns - run->began_ns;

	unit->run = NULL;
	if (!unit->later_ns)
		unit->later_ns = now_ns;
	if (now_ns - unit->later_ns > LATER_MAX_MS * NS_PER_MS)
		leave_caches(unit);
	if (waited_ns < LATER_SOON_MS * NS_PER_MS)
		unit_rest(unit, now_ns + jitter_ns(LATER_PAUSE_MS));
	else
		unit_want(unit, true);
}

/* If nothing has arrived, all units were refused; else the one that was arriving has failed. */
static void attempt_failed(struct run *run)
{
	unsigned first = run->next, behind = run->arrived_bytes ? first + 1 : run->count;
	const struct unit *unit = run->units[first];

	if (is_between_slices(run))
		run->failure = FETCH_LATER;
	if (run->failure != FETCH_LATER)
		log_failure(run, unit);
	note_failure(run, unit);
	if (run->failure == FETCH_LATER) {
		run->next = run->count;
		for (unsigned i = first; i < run->count; i++)
			ask_later(run, run->units[i]);
		return;
	}
	/* Without it, these are not tried again, but asked of another place. */
	if (run->failure == FETCH_ABSENT && run->asked > 1) {
		for (unsigned i = first; i < run->count; i++)
			run->units[i]->out |= 1u << run->mirror->index;
		return;
	}
	run->next = behind;
	for (unsigned i = first; i < behind; i++)
		charge(run, run->units[i]);
}

/* Returns whether something has failed. */
static bool end_at_host(struct run *run)
{
	struct host *host = run->mirror->host;
	bool lacks = run->next < run->count;

	if (host) {
		host->prefetching -= !run->demanded;
		host_is_ready(run->core, host);
	}
	if (run->result && lacks && !run->uncharged && !run->core->ending)
		return true;
	if (host)
		host_ended(host);
	/* What needed no request says nothing of its host. */
	if (host && !run->result && (run->coded_bytes || !run->mirror->source->codec))
		host_measure(host, run->first_ns - run->began_ns, clock_now_ns() - run->began_ns,
			     run->arrived_bytes, host->bytes - run->given_before);
	return false;
}

void attempt_over(struct run *run)
{
	struct core *core = run->core;

	if (!run->result)
		relaxed_add(&core->counts.coded_bytes_fetched, run->coded_bytes);
	relaxed_add(&core->counts.whole_answers, run->whole);
	if (run->whole || !run->result)
		run->mirror->gives_all = run->whole;
	if (run->unsized)
		run->mirror->alone = run->uncharged = true;
	if (end_at_host(run))
		attempt_failed(run);
	else if (!run->result && run->next < run->count)
		run_leave(run);
	/* Requeue what is left without charging a retry. */
	for (unsigned lacks = run->count; lacks > run->next; lacks--) {
		struct unit *unit = run->units[lacks - 1];

		unit->run = NULL;
		if (core->ending || list_is_empty(&unit->subscriptions))
			unit_set(unit, UNIT_WANTED);
		else
			unit_want(unit, true);
	}
	run_free(run);
}

static void drop_identity(struct unit *unit)
{
	free(unit->identity);
	unit->identity = NULL;
}

static void refuse_bytes(struct unit *unit)
{
	struct mirror *mirror = unit->mirror;

	relaxed_add(&unit->core->counts.wrong_digests, 1);
	count_wrong(unit, mirror);
	count_bad(unit, mirror);
	/* What one node of a ring has stored wrong, each of its fronts passes on. */
	if (mirror->via)
		leave_caches(unit);
	unit_log(unit, "wrong_digest", mirror, NULL, "wrong content (SHA-256)");
}

static void refuse(struct unit *unit)
{
	struct mirror *mirror = unit->mirror;
	struct fetch_counts *counts = &unit->core->counts;
	int err = unit->check.err;

	drop_identity(unit);
	if (err == -EBADMSG) {
		refuse_bytes(unit);
	} else if (err == -ESTALE) {
		const char *why = "another one was pinned at the same time";
		bool doubted = doubt_change(unit, mirror, unit->began_ns, why);

		relaxed_add(&counts->failures[doubted ? FETCH_TRANSIENT : FETCH_CHANGED], 1);
		if (!doubted)
			set_changed(unit, mirror, why);
	} else {
		relaxed_add(&counts->local_failures, 1);
		unit_log(unit, "not_checked", NULL, NULL, strerror(-err));
		/*
		 * Fetching it again would not free space on the map's disk, so readers with a
		 * deadline get the error now. A lack of memory may be over in a moment.
		 */
		if (err != -ENOMEM) {
			unit_give_up(unit, clock_now_ns(), "the map cannot be written");
			return;
		}
	}
	unit_retry(unit);
}

/* Handles right content. */
static void accept(struct unit *unit)
{
	struct mirror *mirror = unit->mirror;
	struct fetch_counts *counts = &unit->core->counts;

	if (unit->identity && mirror->identity &&
	    !identity_is_same(mirror->identity, unit->identity)) {
		unit->check.err = -ESTALE;
		refuse(unit);
		return;
	}
	if (!mirror->identity)
		mirror->identity = unit->identity;
	else
		free(unit->identity);
	unit->identity = NULL;
	/* Not for a fetch that was already running when another one found the change. */
	if (clock_now_ns() >= mirror->changed_until_ns)
		mirror->changed_until_ns = 0;
	forget_doubt(mirror);
	mirror->bad_in_a_row = 0;
	if (unit->check.known)
		relaxed_add(&counts->units_verified, 1);
	if (unit->check.pinned)
		relaxed_add(&counts->units_pinned, 1);
	if (unit->urgency != URGENCY_DEMAND)
		relaxed_add(&counts->units_prefetched, 1);
	unit_verified(unit, false);
}

void unit_checked(struct unit *unit)
{
	if (unit->check.err)
		refuse(unit);
	else
		accept(unit);
}

void unit_begin(struct unit *unit)
{
	uint64_t now_ns = clock_now_ns();
	struct mirror *mirror = unit_take_turn(unit, now_ns);

	if (mirror && unit_allocate(unit))
		run_begin(unit, mirror, now_ns);
}
