/* SPDX-License-Identifier: MIT */
/* Chooses the mirror that a unit is fetched from, and so the host that it waits for. */
#include <stdio.h>

#include "base/utf8.h"
#include "lazy/core.h"

enum {
	PROBE_WAIT_MS = 50,
	MEMORY_WAIT_MS = 50,
	UNHEALTHY_MS = 30000, /* how long others are preferred, as it may have recovered by then */
};

/* Returns false when there is no memory for it. A fetch ends at the host that it began at. */
static bool find_host(struct core *core, struct mirror *mirror)
{
	char text[512], name[512];

	if (mirror->host || !mirror->ops->host)
		return true;
	/*
	 * NB: the name of a directory may be any bytes, and may have been cut, and it is shown in
	 * statistics.
	 */
	snprintf(name, sizeof(name), "%s", mirror->ops->host(mirror, text, sizeof(text)));
	utf8_repair(name);
	mirror->host = host_get(&core->hosts, name, mirror->ops->blocking);
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

/*
 * Whether others are preferred. NB: being asked counts like a failure. So when an unhealthy mirror
 * has been left alone for long enough, one unit tries it, and the others do not wait for that.
 */
static bool is_unhealthy(const struct unit *unit, const struct mirror *mirror, uint64_t now_ns)
{
	const struct host *host = mirror->host;
	uint64_t for_ns = (unit->core->options.unhealthy_ms ?: UNHEALTHY_MS) * NS_PER_MS;

	if (mirror->bad_in_a_row >= UNHEALTHY_FAILURES && now_ns < mirror->recent_ns + for_ns)
		return true;
	return host && host->in_a_row >= UNHEALTHY_FAILURES && now_ns < host->recent_ns + for_ns;
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

		if (is_out(unit, mirror, now_ns))
			continue;
		ready = find_host(unit->core, mirror) ? ready_ns(unit, mirror, now_ns) :
							now_ns + MEMORY_WAIT_MS * NS_PER_MS;
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
