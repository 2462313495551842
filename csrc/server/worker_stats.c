/* SPDX-License-Identifier: MIT */
#include "server/worker_stats.h"

#include <sys/mman.h>

struct worker_stats *worker_stats_new(unsigned kind_count)
{
	size_t bytes = sizeof(struct worker_stats) + kind_count * sizeof(struct kind_stats);
	/* Not from the heap, whose pages other threads may have touched first. */
	struct worker_stats *stats =
		mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	if (stats == MAP_FAILED)
		return NULL;
	/* NB: MAP_POPULATE has no effect in a process that locks its memory on faults. */
	if (madvise(stats, bytes, MADV_POPULATE_WRITE)) {
		munmap(stats, bytes);
		return NULL;
	}
	stats->mapped_bytes = bytes;
	return stats;
}

void worker_stats_free(struct worker_stats *stats)
{
	if (stats)
		munmap(stats, stats->mapped_bytes);
}

void worker_stats_merge(struct kind_stats *sum, const struct kind_stats *from)
{
	const struct counters *counters = &from->counters;

	for (unsigned op = 0; op < IO_OP_COUNT; op++) {
		sum->counters.requests[op] += relaxed_load(&counters->requests[op]);
		sum->counters.bytes[op] += relaxed_load(&counters->bytes[op]);
	}
	sum->counters.errors += relaxed_load(&counters->errors);
	for (unsigned group = 0; group < LATENCY_GROUPS; group++)
		histogram_merge(&sum->latency[group], &from->latency[group]);
}

void worker_stats_time_answers(struct worker_stats *stats)
{
	uint64_t now_ns;

	if (!stats->answers_count)
		return;
	now_ns = clock_now_ns();
	for (unsigned i = 0; i < stats->answers_count; i++) {
		struct timed_answers *answers = &stats->answers[i];

		histogram_add(answers->latency, now_ns - answers->started_ns, answers->count);
	}
	stats->answers_count = 0;
}

void worker_stats_end_round(struct worker_stats *stats)
{
	worker_stats_time_answers(stats);
	stats->round_ns = 0;
	if (!stats->answered)
		return;
	stats->rounds++;
	if (stats->in_flight > stats->max_in_flight)
		relaxed_store(&stats->max_in_flight, stats->in_flight);
	relaxed_store(&stats->in_flight, stats->in_flight - stats->answered);
	stats->answered = 0;
}
