/* SPDX-License-Identifier: MIT */
#include "lazy/latency.h"

#include <stdlib.h>
#include <string.h>

#include "base/histogram_json.h"

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

void latencies_free(struct latency *list)
{
	while (list) {
		struct latency *next = list->next;

		free(list->host);
		free(list);
		list = next;
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
