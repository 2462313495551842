/* SPDX-License-Identifier: MIT */
/*
 * Circuit breakers, one per host: after failures in a row for some time, it is left alone for a
 * while; then one fetch tries it. The fetcher's thread; any thread may read the counters.
 */
#ifndef LAZY_BREAKER_H
#define LAZY_BREAKER_H

#include <stdbool.h>
#include <stdint.h>

struct breaker {
	struct breaker *next; /* atomic */
	char *host;

	unsigned in_a_row;	   /* failures */
	uint64_t first_failure_ns; /* of those */
	uint64_t recent_ns;	   /* when it was asked last, or has failed since */
	uint64_t open_until_ns;	   /* 0: closed */
	unsigned opened;	   /* times, since it was closed */
	bool probing;		   /* a fetch tries it */
	unsigned prefetching;	   /* of those in flight, fetches that nobody has waited for */

	/* For statistics: base/relaxed.h. */
	uint64_t attempts, failures, bytes, in_flight, openings;
	uint64_t is_open;
};

enum breaker_answer {
	BREAKER_GO,
	BREAKER_WAIT, /* for the fetch that tries it */
	BREAKER_OPEN, /* until open_until_ns */
};

/* The one of `host`, made where there is none; NULL when memory is short. */
struct breaker *breaker_get(struct breaker **list, const char *host);
void breakers_free(struct breaker *list);

enum breaker_answer breaker_ask(const struct breaker *breaker, uint64_t now_ns);
/* A fetch begins that breaker_ask() has let go, and ends. */
void breaker_begin(struct breaker *breaker, uint64_t now_ns);
void breaker_succeeded(struct breaker *breaker, uint32_t bytes);
void breaker_failed(struct breaker *breaker, uint64_t now_ns);
/* It ended in a way that says nothing of the host. */
void breaker_ended(struct breaker *breaker);

#endif
