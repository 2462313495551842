/* SPDX-License-Identifier: MIT */
/*
 * How long fetches took, by kind of mirror and host. Local files have no host here. The fetcher's
 * thread writes, any thread may read.
 */
#ifndef LAZY_LATENCY_H
#define LAZY_LATENCY_H

#include <jansson.h>

#include "base/histogram.h"

struct latency {
	struct latency *next; /* atomic */
	const char *kind;     /* of mirror; a static string */
	char *host;	      /* empty: this machine */
	struct histogram histogram;
};

/*
 * Returns the entry of that kind and host, which is made if there is none. Returns NULL when memory
 * is short. `host` is what mirror_ops.host returned, or "".
 */
struct latency *latency_get(struct latency **list, const char *kind, const char *host);
void latencies_free(struct latency *list);
/*
 * Returns [{"kind": ..., "host": ..., and the keys of histogram_json()}, ...], or NULL when memory
 * is short.
 */
json_t *latencies_json(struct latency *const *list);

#endif
