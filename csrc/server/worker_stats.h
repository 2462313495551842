/* SPDX-License-Identifier: MIT */
/*
 * Statistics of one worker, by segment kind: requests, bytes, errors and latencies; and the number
 * of requests in flight and refused. The worker writes and any thread may read them, as relaxed
 * atomics. What other threads answer counts in statistics that have no worker, under a lock.
 *
 * A latency is the time from when the front end hands a request to the engine until its answer
 * leaves, measured in rounds. A round is all that the front end does between two waits (a batch of
 * completions; one FUSE request), and all of it counts as beginning and ending at one time. So the
 * clock is read twice per round instead of twice per request, and only in one of
 * WORKER_STATS_SAMPLED rounds where all is answered at once. Each part of a split request counts
 * for its kind.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/clock.h"
#include "base/histogram.h"
#include "base/relaxed.h"
#include "server/io.h"

/* Groups of operations with similar latencies. */
enum latency_group {
	LATENCY_READS,
	LATENCY_WRITES, /* includes discards and zeroes */
	LATENCY_FLUSHES,
	LATENCY_GROUPS,
};

struct counters {
	uint64_t requests[IO_OP_COUNT];
	uint64_t bytes[IO_OP_COUNT];
	uint64_t errors;
};

struct kind_stats {
	struct counters counters;
	struct histogram latency[LATENCY_GROUPS];
};

/* Parts with the same histogram and start, which are timed when the round ends. */
struct timed_answers {
	struct histogram *latency;
	uint64_t started_ns;
	uint64_t count;
};

enum {
	WORKER_STATS_ANSWERS = 32,
	WORKER_STATS_SAMPLED = 4, /* a power of two */
};

struct worker_stats {
	uint32_t in_flight; /* unanswered requests, and those answered in this round */
	uint32_t max_in_flight;
	uint32_t answered; /* requests answered in this round */
	uint32_t rounds;   /* rounds in which something was answered */
	/* atomic: requests that other threads have answered since, and that count in `in_flight` */
	uint32_t answered_elsewhere;
	uint64_t refused;  /* requests that failed before they reached a segment */
	uint64_t round_ns; /* when this round began; 0: not needed so far */
	unsigned answers_count;
	struct timed_answers answers[WORKER_STATS_ANSWERS];
	size_t mapped_bytes;
	struct kind_stats kinds[];
};

/*
 * To be called by the worker's own thread once it is pinned, so that the memory comes from its NUMA
 * node. Returns NULL when memory is short.
 */
struct worker_stats *worker_stats_new(unsigned kind_count);
void worker_stats_free(struct worker_stats *stats);

/*
 * The start of a part that its kind gets now: the start of this round, or 0 when it is not timed.
 * `at_once`: its kind answers without waiting.
 */
static inline uint64_t worker_stats_start_ns(struct worker_stats *stats, bool at_once)
{
	if (at_once && stats->rounds % WORKER_STATS_SAMPLED)
		return 0;
	if (!stats->round_ns)
		stats->round_ns = clock_now_ns();
	return stats->round_ns;
}

/* Adds what `from` contains; its worker may write at the same time. */
void worker_stats_merge(struct kind_stats *sum, const struct kind_stats *from);

/* Adds the latencies of what was answered since the round began, or since the last call. */
void worker_stats_time_answers(struct worker_stats *stats);

static inline void worker_stats_request(struct worker_stats *stats)
{
	relaxed_add(&stats->in_flight, 1);
}

static inline void worker_stats_answer(struct worker_stats *stats)
{
	stats->answered++;
}

/* Another thread has answered; any thread may call this. */
static inline void worker_stats_answer_elsewhere(struct worker_stats *stats)
{
	__atomic_add_fetch(&stats->answered_elsewhere, 1, __ATOMIC_RELAXED);
}

/* The worker knows that, and this round counts the answer. */
static inline void worker_stats_take_answer(struct worker_stats *stats)
{
	__atomic_sub_fetch(&stats->answered_elsewhere, 1, __ATOMIC_RELAXED);
	stats->answered++;
}

/* Requests without an answer. Any thread may call this. */
static inline uint32_t worker_stats_in_flight(const struct worker_stats *stats)
{
	uint32_t all = relaxed_load(&stats->in_flight);
	uint32_t answered = relaxed_load(&stats->answered_elsewhere);

	return all > answered ? all - answered : 0;
}

static inline void worker_stats_refusal(struct worker_stats *stats)
{
	relaxed_add(&stats->refused, 1);
}

/* Counts a finished part, for which worker_stats_start_ns() has returned `started_ns`. */
static inline void worker_stats_part(struct worker_stats *stats, unsigned kind, enum io_op op,
				     uint32_t bytes, int result, uint64_t started_ns)
{
	static const uint8_t groups[IO_OP_COUNT] = {
		[IO_OP_READ] = LATENCY_READS,	       [IO_OP_WRITE] = LATENCY_WRITES,
		[IO_OP_FLUSH] = LATENCY_FLUSHES,       [IO_OP_DISCARD] = LATENCY_WRITES,
		[IO_OP_WRITE_ZEROES] = LATENCY_WRITES,
	};
	struct kind_stats *of_kind = &stats->kinds[kind];
	struct histogram *latency = &of_kind->latency[groups[op]];
	struct timed_answers *last = &stats->answers[stats->answers_count];

	relaxed_add(&of_kind->counters.requests[op], 1);
	if (result < 0)
		relaxed_add(&of_kind->counters.errors, 1);
	else
		relaxed_add(&of_kind->counters.bytes[op], bytes);
	if (!started_ns)
		return;
	if (stats->answers_count && last[-1].latency == latency &&
	    last[-1].started_ns == started_ns) {
		last[-1].count++;
		return;
	}
	if (stats->answers_count == WORKER_STATS_ANSWERS) {
		worker_stats_time_answers(stats);
		last = stats->answers;
	}
	*last = (struct timed_answers){ latency, started_ns, 1 };
	stats->answers_count++;
}

/* To be called when the front end has sent its answers, or is about to. */
void worker_stats_end_round(struct worker_stats *stats);
