/* SPDX-License-Identifier: MIT */
#include "fetch/host.h"

#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/histogram_json.h"
#include "base/relaxed.h"
#include "fetch/event.h"

enum {
	/*
	 * Both must be reached. Readers have time, so retries bridge a server's restart; and one
	 * failure after a long pause says little.
	 */
	OPEN_AFTER_FAILURES = 8,
	OPEN_AFTER_S = 10,
	OPEN_FIRST_S = 1, /* doubled each time a probe fails */
	OPEN_LAST_S = 5,  /* readers wait that long */

	/* Of runs: before a host is measured; so that stores need few requests; at most. */
	RUN_FIRST_BYTES = 1 << 20,
	RUN_LEAST_BYTES = 4 << 20,
	RUN_MOST_BYTES = 8 << 20,
	RUN_ROUND_TRIPS = 4, /* what is asked for takes so many, so that few of them are lost */
	RUN_PER_S = 2,	     /* it takes at most half a second of a slow link */
	CUTS_MAX = 11,
	SMOOTH = 8,
	RATE_MIN_BYTES = 64 << 10, /* less says how long a round trip takes, not how fast it is */
};

void host_init(struct host *host)
{
	for (unsigned i = 0; i < URGENCIES; i++)
		list_init(&host->waiting[i]);
}

struct host *host_get(struct host **list, const char *name, bool blocking)
{
	struct host *host;

	for (host = *list; host; host = host->next) {
		if (!strcmp(host->name, name))
			return host;
	}
	host = calloc(1, sizeof(*host));
	if (!host)
		return NULL;
	host->name = strdup(name);
	if (!host->name) {
		free(host);
		return NULL;
	}
	host_init(host);
	host->blocking = blocking;
	host->next = *list;
	__atomic_store_n(list, host, __ATOMIC_RELEASE);
	return host;
}

struct latency *latency_get(struct latency **list, const char *kind, const char *host)
{
	struct latency *latency;

	for (latency = *list; latency; latency = latency->next) {
		if (!strcmp(latency->kind, kind) && !strcmp(latency->host, host))
			return latency;
	}
	latency = calloc(1, sizeof(*latency));
	if (!latency)
		return NULL;
	latency->kind = kind;
	latency->host = strdup(host);
	if (!latency->host) {
		free(latency);
		return NULL;
	}
	latency->next = *list;
	__atomic_store_n(list, latency, __ATOMIC_RELEASE);
	return latency;
}

void hosts_free(struct host *hosts, struct latency *latencies)
{
	while (hosts) {
		struct host *next = hosts->next;

		free(hosts->name);
		free(hosts);
		hosts = next;
	}
	while (latencies) {
		struct latency *next = latencies->next;

		free(latencies->host);
		free(latencies);
		latencies = next;
	}
}

static json_t *latency_json(const struct latency *latency)
{
	struct histogram sum = {};
	json_t *json;

	histogram_merge(&sum, &latency->histogram);
	json = histogram_json(&sum);
	if (json && !json_object_set_new(json, "kind", json_string(latency->kind)) &&
	    !json_object_set_new(json, "host", json_string(latency->host)))
		return json;
	json_decref(json);
	return NULL;
}

json_t *latencies_json(struct latency *const *list)
{
	const struct latency *latency = __atomic_load_n(list, __ATOMIC_ACQUIRE);
	json_t *all = json_array();

	for (; latency; latency = latency->next) {
		if (json_array_append_new(all, latency_json(latency))) {
			json_decref(all);
			return NULL;
		}
	}
	return all;
}

enum breaker_answer host_ask(const struct host *host, uint64_t now_ns)
{
	if (!host->open_until_ns)
		return BREAKER_GO;
	if (now_ns < host->open_until_ns)
		return BREAKER_OPEN;
	return host->probing ? BREAKER_WAIT : BREAKER_GO;
}

void host_begin(struct host *host, uint64_t now_ns)
{
	host->recent_ns = now_ns;
	if (host->open_until_ns)
		host->probing = true;
	relaxed_add(&host->attempts, 1);
	relaxed_add(&host->in_flight, 1);
}

void host_ended(struct host *host)
{
	/*
	 * This also counts fetches that began before its breaker opened. At worst, one more fetch
	 * probes the host.
	 */
	host->probing = false;
	relaxed_add(&host->in_flight, -1);
}

void host_gave(struct host *host, uint32_t bytes)
{
	relaxed_add(&host->bytes, bytes);
	if (host->open_until_ns)
		event_log_host("breaker_closed", host->name, "it answers again");
	host->in_a_row = 0;
	host->silent = false;
	host->open_until_ns = 0;
	host->opened = 0;
	relaxed_store(&host->is_open, 0);
}

void host_measure(struct host *host, uint64_t first_byte_ns, uint64_t all_ns, uint64_t bytes,
		  uint64_t given)
{
	uint64_t rate = (given > bytes ? given : bytes) * 1000000 / (all_ns / 1000 + 1);

	/* It was about as long as it may be. */
	if (host->cuts && bytes >= host_run_bytes(host) / 2)
		host->cuts--;
	/* A new connection takes longer. */
	if (!host->rtt_ns || first_byte_ns < host->rtt_ns)
		host->rtt_ns = first_byte_ns;
	host->rtt_ns += (first_byte_ns - host->rtt_ns) / SMOOTH;
	if (bytes < RATE_MIN_BYTES)
		return;
	/* So does what has just begun to share the link with others. */
	if (rate > host->bytes_per_s)
		host->bytes_per_s = rate;
	host->bytes_per_s -= (host->bytes_per_s - rate) / SMOOTH;
}

void host_cut(struct host *host)
{
	if (host->cuts < CUTS_MAX)
		host->cuts++;
}

uint64_t host_run_bytes(const struct host *host)
{
	uint64_t bytes = RUN_FIRST_BYTES, rate = host->bytes_per_s;

	if (rate) {
		bytes = RUN_ROUND_TRIPS * (host->rtt_ns / 1000) * (rate / 1000) / 1000;
		if (bytes < RUN_LEAST_BYTES)
			bytes = RUN_LEAST_BYTES;
		if (bytes > RUN_MOST_BYTES)
			bytes = RUN_MOST_BYTES;
		if (bytes > rate / RUN_PER_S)
			bytes = rate / RUN_PER_S;
	}
	return bytes >> host->cuts;
}

bool host_failed(struct host *host, uint64_t now_ns)
{
	uint64_t wait_s = OPEN_FIRST_S;

	host_ended(host);
	relaxed_add(&host->failures, 1);
	host->recent_ns = now_ns;
	if (!host->in_a_row++)
		host->first_failure_ns = now_ns;
	if (now_ns < host->open_until_ns || host->in_a_row < OPEN_AFTER_FAILURES ||
	    now_ns - host->first_failure_ns < OPEN_AFTER_S * NS_PER_S)
		return host->in_a_row == UNHEALTHY_FAILURES;
	for (unsigned i = 0; i < host->opened && wait_s < OPEN_LAST_S; i++)
		wait_s *= 2;
	if (wait_s > OPEN_LAST_S)
		wait_s = OPEN_LAST_S;
	if (!host->opened++)
		event_log_host(
			"breaker_open", host->name,
			"it has failed %u times in a row, for %llu s, and is not asked for a while",
			host->in_a_row,
			(unsigned long long)((now_ns - host->first_failure_ns) / NS_PER_S));
	host->open_until_ns = now_ns + wait_s * NS_PER_S;
	relaxed_add(&host->openings, 1);
	relaxed_store(&host->is_open, 1);
	return true;
}

bool host_is_full(const struct host *host, enum urgency urgency, uint64_t most)
{
	uint64_t in_flight = host->in_flight;

	if (!host->name)
		return false;
	most = host->in_a_row >= UNHEALTHY_FAILURES ? most / 8 : most * 2 / 3;
	if (host->blocking && most > HOST_BLOCKING_MAX)
		most = HOST_BLOCKING_MAX;
	/*
	 * For a unit with readers, fetches without readers do not count, unless their kind blocks:
	 * then cancel() does not free the worker.
	 */
	if (urgency == URGENCY_DEMAND && !host->blocking)
		in_flight -= host->prefetching;
	return in_flight >= (most ?: 1);
}
