/* SPDX-License-Identifier: MIT */
#include "base/histogram_json.h"

static int set(json_t *object, const char *key, uint64_t number)
{
	return json_object_set_new(object, key, json_integer((json_int_t)number));
}

static json_t *buckets_json(const struct histogram *histogram)
{
	json_t *buckets = json_array();
	int err = buckets ? 0 : -1;

	for (unsigned i = 0; i < HISTOGRAM_BUCKETS && !err; i++) {
		uint64_t bound = histogram_bound_ns(i);

		if (!histogram->counts[i])
			continue;
		/* The last bucket has no bound, so use the longest duration. */
		if (bound == UINT64_MAX)
			bound = histogram->max_ns;
		err = json_array_append_new(buckets, json_pack("[I, I]", (json_int_t)bound,
							       (json_int_t)histogram->counts[i]));
	}
	if (!err)
		return buckets;
	json_decref(buckets);
	return NULL;
}

json_t *histogram_json(const struct histogram *histogram)
{
	static const struct {
		const char *key;
		unsigned per_mille;
	} percentiles[] = {
		{ "p50_ns", 500 }, { "p90_ns", 900 }, { "p99_ns", 990 }, { "p99_9_ns", 999 }
	};
	json_t *json = json_object();
	int err = 0;

	err |= set(json, "count", histogram_count(histogram));
	err |= set(json, "sum_ns", histogram->sum_ns);
	err |= set(json, "max_ns", histogram->max_ns);
	for (unsigned i = 0; i < sizeof(percentiles) / sizeof(*percentiles); i++)
		err |= set(json, percentiles[i].key,
			   histogram_percentile_ns(histogram, percentiles[i].per_mille));
	err |= json_object_set_new(json, "buckets", buckets_json(histogram));
	if (!err)
		return json;
	json_decref(json);
	return NULL;
}
