/* SPDX-License-Identifier: MIT */
#include "lazy/breaker.h"

#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/relaxed.h"
#include "lazy/event.h"

enum {
	/*
	 * Both must be reached. Readers have time, so retries bridge a server's restart; and one
	 * failure after a long pause says little.
	 */
	OPEN_AFTER_FAILURES = 8,
	OPEN_AFTER_S = 10,
	OPEN_FIRST_S = 1, /* doubled each time a probe fails */
	OPEN_LAST_S = 5,  /* readers wait that long */
};

struct breaker *breaker_get(struct breaker **list, const char *host)
{
	struct breaker *breaker;

	for (breaker = *list; breaker; breaker = breaker->next) {
		if (!strcmp(breaker->host, host))
			return breaker;
	}
	breaker = calloc(1, sizeof(*breaker));
	if (!breaker)
		return NULL;
	breaker->host = strdup(host);
	if (!breaker->host) {
		free(breaker);
		return NULL;
	}
	breaker->next = *list;
	__atomic_store_n(list, breaker, __ATOMIC_RELEASE);
	return breaker;
}

void breakers_free(struct breaker *list)
{
	while (list) {
		struct breaker *next = list->next;

		free(list->host);
		free(list);
		list = next;
	}
}

enum breaker_answer breaker_ask(const struct breaker *breaker, uint64_t now_ns)
{
	if (!breaker->open_until_ns)
		return BREAKER_GO;
	if (now_ns < breaker->open_until_ns)
		return BREAKER_OPEN;
	return breaker->probing ? BREAKER_WAIT : BREAKER_GO;
}

void breaker_begin(struct breaker *breaker, uint64_t now_ns)
{
	breaker->recent_ns = now_ns;
	if (breaker->open_until_ns)
		breaker->probing = true;
	relaxed_add(&breaker->attempts, 1);
	relaxed_add(&breaker->in_flight, 1);
}

void breaker_ended(struct breaker *breaker)
{
	/*
	 * This also counts fetches that began before it opened. At worst, one more fetch probes the
	 * host.
	 */
	breaker->probing = false;
	relaxed_add(&breaker->in_flight, -1);
}

void breaker_succeeded(struct breaker *breaker, uint32_t bytes)
{
	breaker_ended(breaker);
	relaxed_add(&breaker->bytes, bytes);
	if (breaker->open_until_ns)
		event_log_host("breaker_closed", breaker->host, "it answers again");
	breaker->in_a_row = 0;
	breaker->open_until_ns = 0;
	breaker->opened = 0;
	relaxed_store(&breaker->is_open, 0);
}

void breaker_failed(struct breaker *breaker, uint64_t now_ns)
{
	uint64_t wait_s = OPEN_FIRST_S;

	breaker_ended(breaker);
	relaxed_add(&breaker->failures, 1);
	breaker->recent_ns = now_ns;
	if (!breaker->in_a_row++)
		breaker->first_failure_ns = now_ns;
	if (now_ns < breaker->open_until_ns || breaker->in_a_row < OPEN_AFTER_FAILURES ||
	    now_ns - breaker->first_failure_ns < OPEN_AFTER_S * NS_PER_S)
		return;
	for (unsigned i = 0; i < breaker->opened && wait_s < OPEN_LAST_S; i++)
		wait_s *= 2;
	if (wait_s > OPEN_LAST_S)
		wait_s = OPEN_LAST_S;
	if (!breaker->opened++)
		event_log_host(
			"breaker_open", breaker->host,
			"it has failed %u times in a row, for %llu s, and is not asked for a while",
			breaker->in_a_row,
			(unsigned long long)((now_ns - breaker->first_failure_ns) / NS_PER_S));
	breaker->open_until_ns = now_ns + wait_s * NS_PER_S;
	relaxed_add(&breaker->openings, 1);
	relaxed_store(&breaker->is_open, 1);
}
