/* SPDX-License-Identifier: MIT */
/* Chooses the mirror that a unit is fetched from, and limits the fetches per host. */
#include <stdio.h>

#include "base/utf8.h"
#include "lazy/breaker.h"
#include "lazy/latency.h"
#include "lazy/unit.h"

enum {
	PROBE_WAIT_MS = 50,
	/* consecutive failures of a host or mirror, after which others are preferred */
	UNHEALTHY_FAILURES = 3,
	UNHEALTHY_MS = 30000, /* how long they are preferred, as it may have recovered by then */
};

static void find_breaker(struct fetcher *fetcher, struct mirror *mirror)
{
	char text[512], host[512];

	if (!mirror->breaker && mirror->ops->host) {
		/*
		 * NB: the name of a directory may be any bytes, and may have been cut, and it is
		 * shown in statistics.
		 */
		snprintf(host, sizeof(host), "%s", mirror->ops->host(mirror, text, sizeof(text)));
		utf8_repair(host);
		mirror->breaker = breaker_get(&fetcher->breakers, host);
		mirror->latency = latency_get(&fetcher->latencies, mirror->ops->name,
					      mirror->ops->blocking ? "" : host);
	}
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
 * Whether others are preferred. NB: being asked counts like a failure. So when an unhealthy mirror
 * has been left alone for long enough, one unit tries it, and the others do not wait for that.
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
 * The limit of fetches per host. A host that does not answer must not take all slots, or readers of
 * other hosts would wait for its time-outs. A failing host gets few; a blocking kind gets as many
 * as may block at a time.
 */
static unsigned most_at_a_time(const struct unit *unit, const struct mirror *mirror)
{
	const struct fetcher_options *options = &unit->fetcher->options;
	uint64_t most = options->max_buffer_bytes / unit->source->unit_bytes;

	if (most > options->max_transfers)
		most = options->max_transfers;
	most = mirror->breaker->in_a_row >= UNHEALTHY_FAILURES ? most / 8 : most * 2 / 3;
	if (mirror->ops->blocking && most > MIRROR_WORKERS_PER_PLACE)
		most = MIRROR_WORKERS_PER_PLACE;
	return most ? (unsigned)most : 1;
}

bool mirror_is_full(const struct unit *unit, const struct mirror *mirror)
{
	const struct breaker *breaker = mirror->breaker;
	uint64_t in_flight;

	if (!breaker)
		return false;
	in_flight = breaker->in_flight;
	/*
	 * For a unit with readers, fetches without readers do not count, unless their kind is
	 * blocking: then cancel() does not free the worker.
	 */
	if (unit->demanded && !mirror->ops->blocking)
		in_flight -= breaker->prefetching;
	return in_flight >= most_at_a_time(unit, mirror);
}

bool unit_host_is_full(struct unit *unit)
{
	uint64_t at_ns;
	const struct mirror *mirror = mirror_choose(unit, clock_now_ns(), &at_ns);

	return mirror && mirror_is_full(unit, mirror);
}
