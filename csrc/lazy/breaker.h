/* SPDX-License-Identifier: MIT */
/*
 * Circuit breakers, one per host. After several failures in a row over some time, a host is not
 * asked for a while; then one fetch probes it. Only the fetcher's thread calls these functions; any
 * thread may read the counters.
 */
#ifndef LAZY_BREAKER_H
#define LAZY_BREAKER_H

#include <stdbool.h>
#include <stdint.h>

struct breaker {
	struct breaker *next; /* atomic */
	char *host;

	unsigned in_a_row;	   /* number of consecutive failures */
	uint64_t first_failure_ns; /* when the first of those failures happened */
	uint64_t recent_ns;	   /* when the host was last asked, or has last failed */
	uint64_t open_until_ns;	   /* 0: closed */
	unsigned opened;	   /* how often it has opened since it was last closed */
	bool probing;		   /* one fetch is probing the host */
	unsigned prefetching;	   /* fetches in flight that no reader has waited for */

	/* Statistics; see base/relaxed.h. */
	uint64_t attempts, failures, bytes, in_flight, openings;
	uint64_t is_open;
};

enum breaker_answer {
	BREAKER_GO,
	BREAKER_WAIT, /* wait for the fetch that probes the host */
	BREAKER_OPEN, /* do not ask the host before open_until_ns */
};

/*
 * Returns the breaker of `host`, which is made if there is none. Returns NULL when memory is short.
 */
struct breaker *breaker_get(struct breaker **list, const char *host);
void breakers_free(struct breaker *list);

enum breaker_answer breaker_ask(const struct breaker *breaker, uint64_t now_ns);
/*
 * Call breaker_begin() when a fetch begins that breaker_ask() allowed, and one of the others when
 * it ends.
 */
void breaker_begin(struct breaker *breaker, uint64_t now_ns);
void breaker_succeeded(struct breaker *breaker, uint32_t bytes);
void breaker_failed(struct breaker *breaker, uint64_t now_ns);
/* The fetch ended in a way that says nothing about the host. */
void breaker_ended(struct breaker *breaker);

#endif
