/* SPDX-License-Identifier: MIT */
/*
 * How long fetches took, by kind of mirror and host. Local files have no host here, wherever they are.
 * The fetcher's thread writes; any thread may read.
 */
#ifndef LAZY_LATENCY_H
#define LAZY_LATENCY_H

#include <jansson.h>

#include "base/histogram.h"

struct latency {
	struct latency *next; /* atomic */
	const char *kind;     /* of the mirror, static */
	char *host;	      /* empty: this machine */
	struct histogram histogram;
};

/* Made where there is none; NULL when memory is short. `host`: as of mirror_ops.host, or "". */
struct latency *latency_get(struct latency **list, const char *kind, const char *host);
void latencies_free(struct latency *list);
/* [{"kind": ..., "host": ..., and those of histogram_json()}, ...]; NULL when memory is short. */
json_t *latencies_json(struct latency *const *list);

#endif
