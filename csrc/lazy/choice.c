/* SPDX-License-Identifier: MIT */
/* Which mirror a unit is asked of next, and how much of one host at a time. */
#include "lazy/breaker.h"
#include "lazy/latency.h"
#include "lazy/unit.h"

enum {
	PROBE_WAIT_MS = 50,
	UNHEALTHY_FAILURES = 3, /* in a row, of a host or of a mirror: others come first */
	UNHEALTHY_MS = 30000,	/* and then no longer, as it may be well again */
};

static void find_breaker(struct fetcher *fetcher, struct mirror *mirror)
{
	char text[512];

	if (!mirror->breaker && mirror->ops->host) {
		const char *host = mirror->ops->host(mirror, text, sizeof(text));

		mirror->breaker = breaker_get(&fetcher->breakers, host);
		mirror->latency = latency_get(&fetcher->latencies, mirror->ops->name,
					      mirror->ops->on_hands ? "" : host);
	}
}

static bool is_out(const struct unit *unit, const struct mirror *mirror, uint64_t now_ns)
{
	return now_ns < mirror->changed_until_ns || unit->out & 1u << mirror->index;
}

/*
 * When it can be asked: 0, now; UINT64_MAX: not by those who have a deadline. Of a host that is left alone,
 * the next try is waited for, once: it may be well again, and a read that fails is a file that is not
 * there.
 */
static uint64_t ready_ns(const struct unit *unit, const struct mirror *mirror, uint64_t now_ns)
{
	if (mirror->breaker) {
		switch (breaker_ask(mirror->breaker, now_ns)) {
		case BREAKER_OPEN:
			return unit->waited ? UINT64_MAX : mirror->breaker->open_until_ns;
		case BREAKER_WAIT:
			return now_ns + PROBE_WAIT_MS * NS_PER_MS;
		case BREAKER_GO:
			break;
		}
	}
	return mirror->avoid_until_ns > now_ns ? mirror->avoid_until_ns : 0;
}

/*
 * Others come first. NB: that it is asked counts like a failure: when it has been left alone for long
 * enough, one unit tries it, and the rest do not wait with that one.
 */
static bool is_unhealthy(const struct unit *unit, const struct mirror *mirror, uint64_t now_ns)
{
	const struct fetcher_options *options = &unit->fetcher->options;
	const struct breaker *breaker = mirror->breaker;
	uint64_t for_ns = (options->unhealthy_ms ?: UNHEALTHY_MS) * NS_PER_MS;

	if (mirror->bad_in_a_row >= UNHEALTHY_FAILURES && now_ns < mirror->recent_ns + for_ns)
		return true;
	return breaker && breaker->in_a_row >= UNHEALTHY_FAILURES &&
	       now_ns < breaker->recent_ns + for_ns;
}

struct mirror *mirror_choose(struct unit *unit, uint64_t now_ns, uint64_t *at_ns)
{
	struct source *source = unit->source;
	struct mirror *best = NULL;
	unsigned best_rank = 0;

	*at_ns = UINT64_MAX;
	for (unsigned i = 0; i < source->mirror_count; i++) {
		struct mirror *mirror = &source->mirrors[i];
		unsigned rank = unit->tries[i];
		uint64_t ready;

		find_breaker(unit->fetcher, mirror);
		if (is_out(unit, mirror, now_ns))
			continue;
		ready = ready_ns(unit, mirror, now_ns);
		if (ready) {
			if (ready < *at_ns)
				*at_ns = ready;
			continue;
		}
		if (is_unhealthy(unit, mirror, now_ns))
			rank++;
		if (!best || rank < best_rank) {
			best = mirror;
			best_rank = rank;
		}
	}
	return best;
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

bool mirrors_go_on(const struct unit *unit, unsigned tries, uint64_t now_ns)
{
	const struct source *source = unit->source;
	unsigned left = 0;

	for (unsigned i = 0; i < source->mirror_count; i++) {
		if (is_out(unit, &source->mirrors[i], now_ns))
			continue;
		if (unit->tries[i] < tries)
			return true;
		left++;
	}
	return !left;
}

/*
 * One host that does not answer must not take all there is: others' readers would wait for its time-outs.
 * One that fails gets little, and of what waits on hands, only as many wait as may do so at a time.
 */
static unsigned most_at_a_time(const struct unit *unit, const struct mirror *mirror)
{
	const struct fetcher_options *options = &unit->fetcher->options;
	uint64_t most = options->max_buffer_bytes / unit->source->unit_bytes;

	if (most > options->max_transfers)
		most = options->max_transfers;
	most = mirror->breaker->in_a_row >= UNHEALTHY_FAILURES ? most / 8 : most * 2 / 3;
	if (mirror->ops->on_hands && most > MIRROR_HANDS_OF_PLACE)
		most = MIRROR_HANDS_OF_PLACE;
	return most ? (unsigned)most : 1;
}

bool mirror_is_full(const struct unit *unit, const struct mirror *mirror)
{
	const struct breaker *breaker = mirror->breaker;
	uint64_t in_flight;

	if (!breaker)
		return false;
	in_flight = breaker->in_flight;
	/* What nobody waits for is in nobody's way, where it can be stopped and so takes no hand. */
	if (unit->demanded && !mirror->ops->on_hands)
		in_flight -= breaker->prefetching;
	return in_flight >= most_at_a_time(unit, mirror);
}

bool unit_host_is_full(struct unit *unit)
{
	uint64_t at_ns;
	const struct mirror *mirror = mirror_choose(unit, clock_now_ns(), &at_ns);

	return mirror && mirror_is_full(unit, mirror);
}
