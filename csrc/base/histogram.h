/* SPDX-License-Identifier: MIT */
/*
 * Durations from 100 ns to 100 s, to 12.5 %: each power of two is cut into eight buckets of equal
 * width. Its memory is fixed; histograms of any number of writers add up.
 *
 * One thread writes; any may read at the same time, and sees counts that were right a moment ago.
 */
#ifndef BASE_HISTOGRAM_H
#define BASE_HISTOGRAM_H

#include <stdint.h>

#include "base/relaxed.h"

enum {
	HISTOGRAM_LOW_BITS = 6,	  /* the first bucket: up to 64 ns */
	HISTOGRAM_HIGH_BITS = 37, /* the last one: over 137 s */
	HISTOGRAM_SPLIT_BITS = 3,
	HISTOGRAM_BUCKETS =
		((HISTOGRAM_HIGH_BITS - HISTOGRAM_LOW_BITS) << HISTOGRAM_SPLIT_BITS) + 2,
};

struct histogram {
	uint64_t counts[HISTOGRAM_BUCKETS];
	uint64_t sum_ns;
	uint64_t max_ns;
};

/* Bucket i holds what is longer than the bound of i - 1, up to its own. */
static inline unsigned histogram_bucket(uint64_t ns)
{
	uint64_t below = ns - (ns > 0);
	unsigned exponent;

	if (below >> HISTOGRAM_LOW_BITS == 0)
		return 0;
	if (below >> HISTOGRAM_HIGH_BITS)
		return HISTOGRAM_BUCKETS - 1;
	exponent = 63 - (unsigned)__builtin_clzll(below);
	/* The bits after the leading one count on from the last bucket of the power before. */
	return ((exponent - HISTOGRAM_LOW_BITS) << HISTOGRAM_SPLIT_BITS) + 1 +
	       ((unsigned)(below >> (exponent - HISTOGRAM_SPLIT_BITS)) &
		((1u << HISTOGRAM_SPLIT_BITS) - 1));
}

/* `count` durations of `ns` each. */
static inline void histogram_add(struct histogram *histogram, uint64_t ns, uint64_t count)
{
	relaxed_add(&histogram->counts[histogram_bucket(ns)], count);
	relaxed_add(&histogram->sum_ns, ns * count);
	if (ns > histogram->max_ns)
		relaxed_store(&histogram->max_ns, ns);
}

/* The longest duration that bucket `bucket` holds; UINT64_MAX for the last one. */
uint64_t histogram_bound_ns(unsigned bucket);

/* Adds what `from` holds, which may be written at the same time. */
void histogram_merge(struct histogram *sum, const struct histogram *from);

uint64_t histogram_count(const struct histogram *histogram);

/*
 * What `per_mille` of 1000 durations do not exceed: the bound of a bucket, hence up to 12.5 % more
 * than the true value, but never more than the longest. 0 when there are none.
 */
uint64_t histogram_percentile_ns(const struct histogram *histogram, unsigned per_mille);

#endif
