/* SPDX-License-Identifier: MIT */
/*
 * A histogram as JSON for statistics: count, sum, percentiles and the buckets that are not empty.
 */
#pragma once

#include <jansson.h>

#include "base/histogram.h"

/*
 * Returns a new reference, or NULL when memory is short. No other thread may write to the histogram
 * meanwhile.
 */
json_t *histogram_json(const struct histogram *histogram);
