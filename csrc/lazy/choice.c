/* SPDX-License-Identifier: MIT */
/*
 * Which mirror a unit is fetched from, and so which host it waits for; when it is tried again, and
 * when it is given up.
 */
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>

#include "base/utf8.h"
#include "content/layout.h"
#include "lazy/core.h"

enum {
	BACK_OFF_FIRST_MS = 50, /* doubled after each failure */
	BACK_OFF_LAST_MS = 5000,
	CACHE_PAUSE_MS = 100,
	PROBE_WAIT_MS = 50,
	MEMORY_WAIT_MS = 50,
	UNHEALTHY_MS = 30000, /* how long others are preferred, as it may have recovered by then */
	CACHE_UNHEALTHY_MS = 10000, /* the same for caches: others cost the origin */
	/*
	 * Of the object, for which hosts choose the same caches: several units, so that neighbours
	 * may be asked for together.
	 */
	CACHED_TOGETHER_BYTES = 4 << 20,
	CACHES_BEFORE_ORIGIN = 2,
};

/*
 * Returns false when there is no memory for it. A fetch ends at the host that it began at, so one
 * that has fetches stays. That of a local file becomes its file system once this is known.
 */
static bool find_host(struct core *core, struct mirror *mirror)
{
	struct host *before = mirror->host;
	char text[512], name[512];

	if (!mirror->ops->host || (before && (!mirror->ops->blocking || before->in_flight)))
		return true;
	/*
	 * NB: the name of a directory may be any bytes, and may have been cut, and it is shown in
	 * statistics.
	 */
	snprintf(name, sizeof(name), "%s",
		 mirror->via ? strstr(mirror->via, "://") + 3 :
			       mirror->ops->host(mirror, text, sizeof(text)));
	utf8_repair(name);
	if (before && !strcmp(before->name, name))
		return true;
	mirror->host = host_get(&core->hosts, name, mirror->ops->blocking) ?: before;
	mirror->latency =
		latency_get(&core->latencies, mirror->ops->name, mirror->ops->blocking ? "" : name);
	return mirror->host;
}

static bool is_out(const struct unit *unit, const struct mirror *mirror, uint64_t now_ns)
{
	return now_ns < mirror->changed_until_ns || unit->out & 1u << mirror->index;
}

/*
 * When the mirror can be asked: 0: now; UINT64_MAX: never, for readers with a deadline. An open
 * breaker is waited for once: the host may recover, and a failed read looks like a missing file.
 */
static uint64_t ready_ns(const struct unit *unit, const struct mirror *mirror, uint64_t now_ns)
{
	if (mirror->host) {
		switch (host_ask(mirror->host, now_ns)) {
		case BREAKER_OPEN:
			return unit->waited ? UINT64_MAX : mirror->host->open_until_ns;
		case BREAKER_WAIT:
			return now_ns + PROBE_WAIT_MS * NS_PER_MS;
		case BREAKER_GO:
			break;
		}
	}
	return mirror->avoid_until_ns > now_ns ? mirror->avoid_until_ns : 0;
}

static bool is_recent(const struct unit *unit, const struct mirror *mirror, uint64_t recent_ns,
		      uint64_t now_ns)
{
	uint64_t usual_ms = mirror->via ? CACHE_UNHEALTHY_MS : UNHEALTHY_MS;

	return now_ns < recent_ns + (unit->core->options.unhealthy_ms ?: usual_ms) * NS_PER_MS;
}

/*
 * Whether others are preferred. NB: being asked counts like a failure. So when an unhealthy mirror
 * has been left alone for long enough, one unit tries it, and the others do not wait for that.
 */
static bool is_unhealthy(const struct unit *unit, const struct mirror *mirror, uint64_t now_ns)
{
	const struct host *host = mirror->host;

	if (mirror->bad_in_a_row >= UNHEALTHY_FAILURES &&
	    is_recent(unit, mirror, mirror->recent_ns, now_ns))
		return true;
	return host && host->in_a_row >= UNHEALTHY_FAILURES &&
	       is_recent(unit, mirror, host->recent_ns, now_ns);
}

/* Whether it is a cache that was silent, and has not answered since. */
static bool is_silent(const struct unit *unit, const struct mirror *mirror, uint64_t now_ns)
{
	const struct host *host = mirror->host;

	return host && host->silent && is_recent(unit, mirror, host->recent_ns, now_ns);
}

/* Spreads what differs in a few bits (the end of MurmurHash3). */
static uint64_t mix_u64(uint64_t x)
{
	x = (x ^ x >> 33) * 0xff51afd7ed558ccdull;
	x = (x ^ x >> 33) * 0xc4ceb9fe1a85ec53ull;
	return x ^ x >> 33;
}

struct choice {
	struct unit *unit;
	uint64_t now_ns;
	struct mirror *best;
	unsigned best_rank;
	uint64_t at_ns; /* the earliest time when one of the others can be asked */
};

static void consider(struct choice *choice, struct mirror *mirror, unsigned rank)
{
	struct unit *unit = choice->unit;
	uint64_t now_ns = choice->now_ns, ready;

	if (is_out(unit, mirror, now_ns))
		return;
	ready = find_host(unit->core, mirror) ? ready_ns(unit, mirror, now_ns) :
						now_ns + MEMORY_WAIT_MS * NS_PER_MS;
	if (ready) {
		if (ready < choice->at_ns)
			choice->at_ns = ready;
		return;
	}
	if (is_unhealthy(unit, mirror, now_ns))
		rank++;
	if (!choice->best || rank < choice->best_rank) {
		choice->best = mirror;
		choice->best_rank = rank;
	}
}

/*
 * The cache with the greatest weight for the unit, of those in front of `origin` that come behind
 * `last` (NULL: all). What is not well comes last.
 */
static struct mirror *next_cache(const struct choice *choice, const struct mirror *origin,
				 uint64_t *last)
{
	const struct unit *unit = choice->unit;
	const struct source *source = unit->source;
	uint64_t part = unit_extent(source, unit->number).offset / CACHED_TOGETHER_BYTES;
	struct mirror *best = NULL;
	uint64_t best_weight = 0;

	for (unsigned i = source->mirror_count; i < source->place_count; i++) {
		struct mirror *mirror = &source->mirrors[i];
		/* The upper bit: it is well. The last ones: no two have the same. */
		uint64_t weight = mix_u64(mirror->weight + part) >> 1 & ~(uint64_t)0x1f;
		bool open = mirror->host && host_ask(mirror->host, choice->now_ns) != BREAKER_GO;

		if (mirror->origin != origin)
			continue;
		if (!open && !is_unhealthy(unit, mirror, choice->now_ns) &&
		    !is_silent(unit, mirror, choice->now_ns))
			weight |= 1ull << 63;
		weight |= i;
		if (weight > best_weight && weight < *last) {
			best = mirror;
			best_weight = weight;
		}
	}
	*last = best_weight;
	return best;
}

/*
 * Nothing is pinned by what a cache says; so the mirror itself says what its object is, unless
 * digests do.
 */
static bool may_ask_caches(const struct mirror *mirror)
{
	return mirror->ops->immutable || mirror->identity || mirror->source->has_digests;
}

/*
 * The more of the caches have failed a unit, the less they come before the mirror: however many
 * there are, it is asked after two of them.
 */
static void consider_caches(struct choice *choice, const struct mirror *mirror)
{
	const struct unit *unit = choice->unit;
	const struct source *source = unit->source;
	uint64_t last = UINT64_MAX;
	unsigned tries = 0;

	if (source->place_count == source->mirror_count || !may_ask_caches(mirror))
		return;
	for (unsigned i = source->mirror_count; i < source->place_count; i++)
		tries += source->mirrors[i].origin == mirror ? unit->tries[i] : 0;
	for (unsigned i = 0; i < CACHES_BEFORE_ORIGIN; i++) {
		struct mirror *cache = next_cache(choice, mirror, &last);
		unsigned rank = tries / CACHES_BEFORE_ORIGIN;

		if (!cache)
			return;
		if (unit->tries[cache->index] > rank)
			rank = unit->tries[cache->index];
		consider(choice, cache, rank);
	}
}

struct mirror *mirror_choose(struct unit *unit, uint64_t now_ns, uint64_t *at_ns)
{
	struct source *source = unit->source;
	struct choice choice = { .unit = unit, .now_ns = now_ns, .at_ns = UINT64_MAX };

	for (unsigned i = 0; i < source->mirror_count; i++) {
		consider_caches(&choice, &source->mirrors[i]);
		consider(&choice, &source->mirrors[i], unit->tries[i]);
	}
	*at_ns = choice.at_ns;
	return choice.best;
}

bool mirror_has_other(const struct unit *unit, const struct mirror *mirror, uint64_t now_ns)
{
	const struct source *source = unit->source;

	for (unsigned i = 0; i < source->mirror_count; i++) {
		if (i != mirror->index && !is_out(unit, &source->mirrors[i], now_ns))
			return true;
	}
	return false;
}

void units_choose_again(struct core *core, struct host *host)
{
	struct link *link;

	for (unsigned i = 0; i < URGENCIES; i++) {
		while ((link = list_first(&host->waiting[i]))) {
			struct unit *unit = container_of(link, struct unit, in_queue);

			list_remove(link);
			completion_put(core, &unit->news);
		}
	}
}

void unit_log(const struct unit *unit, const char *name, const struct mirror *mirror,
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

void unit_give_up(struct unit *unit, uint64_t now_ns, const char *why)
{
	unit_log(unit, "given_up", NULL, NULL, why);
	if (unit_fail(unit, -EIO))
		unit_rest(unit, now_ns + BACK_OFF_LAST_MS * NS_PER_MS);
}

/* Whether a failed unit is tried again: as often as its readers' time allows, or a prefetch. */
static bool is_tried_again(const struct unit *unit)
{
	list_for_each (struct subscription, subscription, &unit->subscriptions, link) {
		if (subscription->ops->rounds > unit->rounds)
			return true;
	}
	return false;
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
		unit_give_up(unit, now_ns, "no mirror is left to ask");
}

/* Where a unit waits for that mirror; NULL: it rests or fails when it is its turn. */
static struct host *host_of(struct core *core, const struct mirror *mirror)
{
	return mirror && mirror->host ? mirror->host : &core->no_host;
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

struct mirror *unit_take_turn(struct unit *unit, uint64_t now_ns)
{
	uint64_t at_ns;
	/* What is known of mirrors may have changed while it waited. */
	struct mirror *mirror = mirror_choose(unit, now_ns, &at_ns);
	struct host *host = host_of(unit->core, mirror);

	list_remove(&unit->in_queue);
	if (mirror && host == unit->host)
		return mirror;
	if (mirror)
		unit_queue(unit, host, true);
	else
		wait_for_mirrors(unit, now_ns, at_ns);
	return NULL;
}

uint64_t jitter_ns(uint64_t most_ms)
{
	uint64_t random = 0;

	if (getrandom(&random, sizeof(random), GRND_NONBLOCK) < 0)
		random = clock_now_ns();
	return (random % most_ms + 1) * NS_PER_MS;
}

static uint64_t back_off_ns(const struct unit *unit)
{
	unsigned doublings = unit->rounds > 7 ? 7 : unit->rounds;
	uint64_t most_ms = (uint64_t)BACK_OFF_FIRST_MS << doublings;

	return jitter_ns(most_ms < BACK_OFF_LAST_MS ? most_ms : BACK_OFF_LAST_MS);
}

/*
 * Whether there is no reason to wait: another mirror was tried less often; or none is left, nor a
 * cache.
 */
static bool mirrors_go_on(const struct unit *unit, unsigned tries, uint64_t now_ns)
{
	const struct source *source = unit->source;
	unsigned left = 0;

	for (unsigned i = 0; i < source->place_count; i++) {
		const struct mirror *mirror = &source->mirrors[i];

		if (is_out(unit, mirror, now_ns) ||
		    (mirror->via && !may_ask_caches(mirror->origin)))
			continue;
		/* NB: most caches are not tried at all, as two of them are asked for a unit. */
		if (!mirror->via && unit->tries[i] < tries)
			return true;
		left++;
	}
	return !left;
}

void unit_retry(struct unit *unit)
{
	const struct mirror *mirror = unit->mirror;
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
