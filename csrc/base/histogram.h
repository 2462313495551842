/* SPDX-License-Identifier: MIT */
/*
 * Durations from 100 ns to 100 s, to 12.5 %: each power of two is divided into eight buckets of
 * equal width. A histogram has a fixed size, and histograms can be added up.
 *
 * One thread writes. Any thread may read at the same time, and sees counts that were right a moment
 * ago.
 */
#pragma once

#include <stdint.h>

#include "base/relaxed.h"

enum {
	HISTOGRAM_LOW_BITS = 6,	  /* the first bucket ends at 64 ns */
	HISTOGRAM_HIGH_BITS = 37, /* the last one begins at 137 s */
	HISTOGRAM_SPLIT_BITS = 3,
	HISTOGRAM_BUCKETS =
		((HISTOGRAM_HIGH_BITS - HISTOGRAM_LOW_BITS) << HISTOGRAM_SPLIT_BITS) + 2,
};

struct histogram {
	uint64_t counts[HISTOGRAM_BUCKETS];
	uint64_t sum_ns;
	uint64_t max_ns;
};

/* Bucket i contains durations longer than the bound of i - 1, up to its own bound. */
static inline unsigned histogram_bucket(uint64_t ns)
{
	uint64_t below = ns - (ns > 0);
	unsigned exponent;

	if (below >> HISTOGRAM_LOW_BITS == 0)
		return 0;
	if (below >> HISTOGRAM_HIGH_BITS)
		return HISTOGRAM_BUCKETS - 1;
	exponent = 63 - (unsigned)__builtin_clzll(below);
	/* The bits after the leading one count the buckets of this power of two. */
	return ((exponent - HISTOGRAM_LOW_BITS) << HISTOGRAM_SPLIT_BITS) + 1 +
	       ((unsigned)(below >> (exponent - HISTOGRAM_SPLIT_BITS)) &
		((1u << HISTOGRAM_SPLIT_BITS) - 1));
}

/* Adds `count` durations of `ns` each. */
static inline void histogram_add(struct histogram *histogram, uint64_t ns, uint64_t count)
{
	relaxed_add(&histogram->counts[histogram_bucket(ns)], count);
	relaxed_add(&histogram->sum_ns, ns * count);
	if (ns > histogram->max_ns)
		relaxed_store(&histogram->max_ns, ns);
}

/* The longest duration that belongs to the bucket; UINT64_MAX for the last one. */
uint64_t histogram_bound_ns(unsigned bucket);

/* Adds what `from` contains; another thread may write to it at the same time. */
void histogram_merge(struct histogram *sum, const struct histogram *from);

uint64_t histogram_count(const struct histogram *histogram);

/*
 * Returns the duration that `per_mille` of 1000 do not exceed. It is the bound of a bucket, so up
 * to 12.5 % too long, but never longer than the longest. Returns 0 when there are none.
 */
uint64_t histogram_percentile_ns(const struct histogram *histogram, unsigned per_mille);
