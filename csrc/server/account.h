/* SPDX-License-Identifier: MIT */
/*
 * What one worker did, by segment kind: requests, bytes, errors and latencies; how many requests it
 * has at a time, and how many it refused. The worker writes, anybody may read: relaxed atomics.
 *
 * A latency is the time from when the front end hands a request to the engine until its answer
 * leaves, in rounds: a round is all that the front end does between two waits (a batch of
 * completions; one FUSE request), and begins and ends at one time for all of it. So the clock is
 * read twice a round instead of twice a request, and only in one round of ACCOUNT_SAMPLED where all
 * is answered at once. Of a request that is cut into parts, each part counts for its kind.
 */
#ifndef SERVER_ACCOUNT_H
#define SERVER_ACCOUNT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <time.h>

#include "base/histogram.h"
#include "base/relaxed.h"
#include "server/io_op.h"

/* Operations whose latencies are alike. */
enum latency_group {
	LATENCY_READS,
	LATENCY_WRITES, /* discards and zeroes as well */
	LATENCY_FLUSHES,
	LATENCY_GROUPS,
};

struct counters {
	uint64_t requests[IO_OP_COUNT];
	uint64_t bytes[IO_OP_COUNT];
	uint64_t errors;
};

struct kind_account {
	struct counters counters;
	struct histogram latency[LATENCY_GROUPS];
};

/* Parts that are to be timed when the round ends, and have all but that in common. */
struct account_answers {
	struct histogram *latency;
	uint64_t started_ns;
	uint64_t count;
};

enum {
	ACCOUNT_ANSWERS = 32,
	ACCOUNT_SAMPLED = 4, /* a power of two */
};

struct account {
	uint32_t in_flight; /* requests that are not answered, or in this round only */
	uint32_t max_in_flight;
	uint32_t answered; /* requests, in this round */
	uint32_t rounds;   /* in which something was answered */
	uint64_t refused;  /* requests that failed before they were any segment's */
	uint64_t round_ns; /* when this round began; 0: nobody has asked */
	unsigned answers_count;
	struct account_answers answers[ACCOUNT_ANSWERS];
	size_t mapped_bytes;
	struct kind_account kinds[];
};

/*
 * To be called by the thread that it is of, once that is pinned: its memory then comes from the
 * thread's own NUMA node. NULL when memory is short.
 */
struct account *account_new(unsigned kind_count);
void account_free(struct account *account);

static inline uint64_t account_clock_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
}

/*
 * When a part begins that is handed to its kind now: the beginning of this round, or 0 when it is
 * not timed. `at_once`: its kind answers without waiting.
 */
static inline uint64_t account_start_ns(struct account *account, bool at_once)
{
	if (at_once && account->rounds % ACCOUNT_SAMPLED)
		return 0;
	if (!account->round_ns)
		account->round_ns = account_clock_ns();
	return account->round_ns;
}

/* Adds what `from` holds, which may be written at the same time. */
void account_merge(struct kind_account *sum, const struct kind_account *from);

/* Times what was answered since the round began, or since the last call. */
void account_time_answers(struct account *account);

static inline void account_request(struct account *account)
{
	relaxed_add(&account->in_flight, 1);
}

static inline void account_answer(struct account *account)
{
	account->answered++;
}

static inline void account_refusal(struct account *account)
{
	relaxed_add(&account->refused, 1);
}

/* A part is finished for which account_start_ns() gave `started_ns`. */
static inline void account_part(struct account *account, unsigned kind, enum io_op op,
				uint32_t bytes, int result, uint64_t started_ns)
{
	static const uint8_t groups[IO_OP_COUNT] = {
		[IO_OP_READ] = LATENCY_READS,	       [IO_OP_WRITE] = LATENCY_WRITES,
		[IO_OP_FLUSH] = LATENCY_FLUSHES,       [IO_OP_DISCARD] = LATENCY_WRITES,
		[IO_OP_WRITE_ZEROES] = LATENCY_WRITES,
	};
	struct kind_account *of_kind = &account->kinds[kind];
	struct histogram *latency = &of_kind->latency[groups[op]];
	struct account_answers *last = &account->answers[account->answers_count];

	relaxed_add(&of_kind->counters.requests[op], 1);
	if (result < 0)
		relaxed_add(&of_kind->counters.errors, 1);
	else
		relaxed_add(&of_kind->counters.bytes[op], bytes);
	if (!started_ns)
		return;
	if (account->answers_count && last[-1].latency == latency &&
	    last[-1].started_ns == started_ns) {
		last[-1].count++;
		return;
	}
	if (account->answers_count == ACCOUNT_ANSWERS) {
		account_time_answers(account);
		last = account->answers;
	}
	*last = (struct account_answers){ latency, started_ns, 1 };
	account->answers_count++;
}

/* The front end has given its answers away, or is about to. */
void account_end_round(struct account *account);

#endif
