/* SPDX-License-Identifier: MIT */
#include "base/histogram.h"

uint64_t histogram_bound_ns(unsigned bucket)
{
	unsigned power = (bucket - 1) >> HISTOGRAM_SPLIT_BITS;
	unsigned part = (bucket - 1) & ((1u << HISTOGRAM_SPLIT_BITS) - 1);

	if (bucket == 0)
		return 1ull << HISTOGRAM_LOW_BITS;
	if (bucket >= HISTOGRAM_BUCKETS - 1)
		return UINT64_MAX;
	return ((1ull << HISTOGRAM_SPLIT_BITS) + part + 1)
	       << (power + HISTOGRAM_LOW_BITS - HISTOGRAM_SPLIT_BITS);
}

void histogram_merge(struct histogram *sum, const struct histogram *from)
{
	uint64_t max_ns = relaxed_load(&from->max_ns);

	for (unsigned i = 0; i < HISTOGRAM_BUCKETS; i++)
		sum->counts[i] += relaxed_load(&from->counts[i]);
	sum->sum_ns += relaxed_load(&from->sum_ns);
	if (max_ns > sum->max_ns)
		sum->max_ns = max_ns;
}

uint64_t histogram_count(const struct histogram *histogram)
{
	uint64_t count = 0;

	for (unsigned i = 0; i < HISTOGRAM_BUCKETS; i++)
		count += histogram->counts[i];
	return count;
}

uint64_t histogram_percentile_ns(const struct histogram *histogram, unsigned per_mille)
{
	uint64_t count = histogram_count(histogram), below = 0, bound;
	/* Rounded up, and without overflow. */
	uint64_t rank = count / 1000 * per_mille + (count % 1000 * per_mille + 999) / 1000;

	for (unsigned i = 0; i < HISTOGRAM_BUCKETS; i++) {
		below += histogram->counts[i];
		if (!histogram->counts[i] || below < rank)
			continue;
		bound = histogram_bound_ns(i);
		return bound < histogram->max_ns ? bound : histogram->max_ns;
	}
	return 0;
}
