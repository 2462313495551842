/* SPDX-License-Identifier: MIT */
/*
 * histogram-shell: lines "NS COUNT" on standard input go to two histograms in turn, which are then
 * merged. Prints "COUNT SUM MAX P50 P90 P99 P99.9", then a line "BOUND COUNT" per bucket in use.
 */
#include <inttypes.h>
#include <stdio.h>

#include "base/histogram.h"
#include "base/message.h"

int main(void)
{
	static const unsigned per_mille[] = { 500, 900, 990, 999 };
	struct histogram parts[2] = {}, all = {};
	uint64_t ns, count;

	message_init("histogram-shell");
	for (unsigned i = 0; scanf("%" SCNu64 " %" SCNu64, &ns, &count) == 2; i++)
		histogram_add(&parts[i % 2], ns, count);
	histogram_merge(&all, &parts[0]);
	histogram_merge(&all, &parts[1]);
	printf("%" PRIu64 " %" PRIu64 " %" PRIu64, histogram_count(&all), all.sum_ns, all.max_ns);
	for (unsigned i = 0; i < sizeof(per_mille) / sizeof(*per_mille); i++)
		printf(" %" PRIu64, histogram_percentile_ns(&all, per_mille[i]));
	putchar('\n');
	for (unsigned i = 0; i < HISTOGRAM_BUCKETS; i++) {
		if (all.counts[i])
			printf("%" PRIu64 " %" PRIu64 "\n", histogram_bound_ns(i), all.counts[i]);
	}
	return EXIT_OK;
}
