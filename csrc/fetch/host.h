/* SPDX-License-Identifier: MIT */
/*
 * Hosts: what failures and limits count against. Each has a queue of units, and a circuit breaker:
 * after several failures in a row over some time, a host is not asked for a while; then one fetch
 * probes it. Only the fetcher's thread calls these functions, but for host_latencies_json(); any
 * thread may read the counters.
 */
#pragma once

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/histogram.h"
#include "base/list.h"

enum urgency {
	URGENCY_BACKGROUND, /* of a prefetch */
	URGENCY_AHEAD,	    /* of a read-ahead */
	URGENCY_DEMAND,	    /* a reader waits */
	URGENCIES,
};

enum {
	/* consecutive failures of a host or mirror, after which others are preferred */
	UNHEALTHY_FAILURES = 3,
	/* of a kind that blocks, so that a file system that hangs does not get all workers */
	HOST_BLOCKING_MAX = 3,
};

struct host {
	struct host *next; /* atomic */
	char *name;
	bool blocking; /* fetches occupy workers, also when they are given up */

	struct link waiting[URGENCIES]; /* units */
	struct link
		in_ready[URGENCIES]; /* in core->ready: has such units, and perhaps may begin one */
	unsigned prefetching;	     /* fetches in flight that no reader has waited for */

	unsigned in_a_row;	   /* number of consecutive failures */
	uint64_t first_failure_ns; /* when the first of those failures happened */
	uint64_t recent_ns;	   /* when the host was last asked, or has last failed */
	uint64_t open_until_ns;	   /* of its breaker; 0: closed */
	unsigned opened;	   /* how often it has opened since it was last closed */
	bool probing;		   /* one fetch is probing the host */
	uint64_t answered_ns;	   /* when a fetch has last succeeded */
	bool silent; /* a cache that has answered nobody for as long as one may take, nor since */

	/*
	 * What requests have taken, smoothed, up to the first byte; and how fast bytes come, of all
	 * requests together. 0: none yet.
	 */
	uint64_t rtt_ns, bytes_per_s;
	unsigned cuts; /* how often runs are halved, because such were cut */

	/* Statistics; see base/relaxed.h. */
	uint64_t attempts, failures, bytes, in_flight, openings;
	uint64_t is_open;
};

/* How long fetches took, by kind of mirror and host. Local files have no host here. */
struct latency {
	struct latency *next; /* atomic */
	const char *kind;     /* of mirror; a static string */
	char *host;	      /* empty: this machine */
	struct histogram histogram;
};

enum breaker_answer {
	BREAKER_GO,
	BREAKER_WAIT, /* wait for the fetch that probes the host */
	BREAKER_OPEN, /* do not ask the host before open_until_ns */
};

void host_init(struct host *host);
/* These return what has that name, and make it if there is none. NULL: memory is short. */
struct host *host_get(struct host **list, const char *name, bool blocking);
struct latency *latency_get(struct latency **list, const char *kind, const char *host);
void hosts_free(struct host *hosts, struct latency *latencies);
/* Returns [{"kind": ..., "host": ..., and the keys of histogram_json()}, ...], or NULL. */
json_t *latencies_json(struct latency *const *list);

enum breaker_answer host_ask(const struct host *host, uint64_t now_ns);
/*
 * host_begin() is called when a fetch begins that host_ask() allowed, and one of the others when it
 * ends. host_failed() returns whether units that wait for it should choose again.
 */
void host_begin(struct host *host, uint64_t now_ns);
bool host_failed(struct host *host, uint64_t now_ns);
/* The fetch ended otherwise. */
void host_ended(struct host *host);
/* A unit of so many bytes has come. */
void host_gave(struct host *host, uint32_t bytes);
/*
 * All of a request has come: what it took, how many bytes it had, and how many this host has given
 * since it began, which are those of other requests as well.
 */
void host_measure(struct host *host, uint64_t first_byte_ns, uint64_t all_ns, uint64_t bytes,
		  uint64_t given);
/* A request of several units has broken off: the next ones are for less. */
void host_cut(struct host *host);
/* How many bytes a request may be for. */
uint64_t host_run_bytes(const struct host *host);
/*
 * Whether it has as many fetches as it may have, where a host may have `most` that does not fail.
 * A host that does not answer must not take all slots, or readers of other hosts would wait for its
 * time-outs.
 */
bool host_is_full(const struct host *host, enum urgency urgency, uint64_t most);
