/* SPDX-License-Identifier: MIT */
/* A histogram as statistics show it: its count, sum and percentiles, and the buckets that hold any. */
#ifndef BASE_HISTOGRAM_JSON_H
#define BASE_HISTOGRAM_JSON_H

#include <jansson.h>

#include "base/histogram.h"

/* Of one that nobody writes to meanwhile. A new reference; NULL when memory is short. */
json_t *histogram_json(const struct histogram *histogram);

#endif
