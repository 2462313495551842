/* SPDX-License-Identifier: MIT */
#pragma once

#include <jansson.h>

#include "server/engine.h"

/*
 * What was served so far; NULL when memory is short. Any thread may call it.
 *
 *   {"errors": n, "reads": n, "read_bytes": n, "writes": n, "write_bytes": n, "flushes": n,
 *    "discards": n, "discard_bytes": n, "write_zeroes": n, "write_zeroes_bytes": n,
 *    "refused": n, "kinds": {"file": {"errors": n, ..., "latency": {"reads": LATENCY,
 *    "writes": LATENCY, "flushes": LATENCY}}, ...},
 *    "queues": [{"in_flight": n, "max_in_flight": n}, ...]}
 *
 * The first ones are sums over the segment kinds; "errors" has those that were "refused" as well:
 * requests that failed before they were any segment's, as they were out of range, too long, not of
 * whole blocks, or writes to a read-only device. They are in no other number.
 *
 * A kind lacks the LATENCY of operations that it never had; "writes" include discards and zeroes.
 * worker_stats.h says what is timed. A LATENCY is
 *
 *   {"count": n, "sum_ns": n, "max_ns": n, "p50_ns": n, "p90_ns": n, "p99_ns": n, "p99_9_ns": n,
 *    "buckets": [[upper_ns, count], ...]}
 *
 * where "count" is how many were timed, and buckets are those that are not empty, each of what is
 * longer than the one before and at most upper_ns long. Percentiles are such bounds too, hence up to
 * 12.5 % too long.
 *
 * Kinds may add keys of their own: "lazy", a list of what lazy_stats() in segment/lazy.c makes.
 *
 * A queue is a thread of the front end; "in_flight" are requests that it has and did not answer yet.
 */
json_t *stats_json(const struct engine *engine);
