/* SPDX-License-Identifier: MIT */
#include "lazy/patience.h"

#include "lazy/core.h"

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
	 * An attempt that began without a reader, or for one with more time, is given up when nothing
	 * arrives for half of the new reader's time, or for this long.
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
};

uint64_t run_attempt_deadline_ns(const struct unit *unit, const struct mirror *mirror,
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

uint64_t run_silence_ns(const struct run *run, uint64_t deadline_ns, uint64_t now_ns)
{
	uint64_t half_ns = deadline_ns > now_ns ? (deadline_ns - now_ns) / 2 : 0;

	if (!deadline_ns && run->core->options.silent_ms)
		return run->core->options.silent_ms * NS_PER_MS;
	if (!deadline_ns || half_ns > SILENT_MAX_S * NS_PER_S)
		return SILENT_MAX_S * NS_PER_S;
	return half_ns > SILENT_MIN_MS * NS_PER_MS ? half_ns : SILENT_MIN_MS * NS_PER_MS;
}

uint64_t run_last_deadline_ns(const struct run *run)
{
	uint64_t last_ns = 0;

	for (unsigned i = run->next; i < run->count; i++) {
		uint64_t its_ns = unit_last_deadline_ns(run->units[i]);

		if (its_ns > last_ns)
			last_ns = its_ns;
	}
	return last_ns;
}

uint64_t run_first_silence_ns(const struct run *run)
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

bool run_has_second(const struct run *run, uint64_t now_ns)
{
	const struct unit *unit = run->units[run->next];

	return !unit->rounds && unit_reader(unit) && mirror_has_other(unit, run->mirror, now_ns);
}

uint64_t run_silent_at_ns(const struct run *run, uint64_t now_ns)
{
	/* What came before the timer was set, or is not decoded yet, says less. */
	uint64_t since_ns = run->last_ns ?: now_ns, at_ns;

	at_ns = since_ns + (run->mirror->via ?
				    run_first_silence_ns(run) :
				    run_silence_ns(run, run_last_deadline_ns(run), now_ns));
	return at_ns > now_ns ? at_ns : now_ns;
}
