/* SPDX-License-Identifier: MIT */
#include <string.h>

#include "base/relaxed.h"
#include "fetch/fetcher_ops.h"
#include "fetch/process/channel.h"
#include "lazy/core.h"

static int set(json_t *object, const char *key, const uint64_t *number)
{
	return json_object_set_new(object, key, json_integer((json_int_t)relaxed_load(number)));
}

const char *fetch_failure_name(enum fetch_failure failure)
{
	static const char *const names[] = {
		[FETCH_TRANSIENT] = "transient", [FETCH_BUSY] = "busy",
		[FETCH_NO_LOGIN] = "no_login",	 [FETCH_DENIED] = "denied",
		[FETCH_GONE] = "gone",		 [FETCH_ABSENT] = "absent",
		[FETCH_LATER] = "later",	 [FETCH_CHANGED] = "changed",
		[FETCH_WRONG] = "wrong_answer",
	};

	return names[failure];
}

static int add_failures(json_t *stats, const struct fetch_counts *counts)
{
	json_t *failures = json_object();
	int err = json_object_set_new(stats, "failures", failures);

	for (unsigned i = 0; i <= FETCH_WRONG && !err; i++)
		err = set(failures, fetch_failure_name(i), &counts->failures[i]);
	if (!err)
		err = set(failures, "wrong_digest", &counts->wrong_digests);
	if (!err)
		err = set(failures, "local", &counts->local_failures);
	return err;
}

enum { HOSTS_MAX = 128 /* limits the size of the reply */ };

/*
 * Finds the hosts that were asked first, so that they are the same ones each time. Returns how many
 * there are.
 */
static unsigned find_hosts(const struct host *all, const struct host **hosts)
{
	unsigned count = 0, over;

	for (const struct host *host = all; host; host = host->next)
		count++;
	over = count > HOSTS_MAX ? count - HOSTS_MAX : 0;
	for (*hosts = all; over; over--)
		*hosts = (*hosts)->next;
	return count;
}

static int add_hosts(json_t *stats, struct core *core)
{
	const struct host *host;
	unsigned count = find_hosts(__atomic_load_n(&core->hosts, __ATOMIC_ACQUIRE), &host);
	json_t *hosts = json_object();
	int err = json_object_set_new(stats, "hosts", hosts);

	if (!err)
		err = json_object_set_new(stats, "hosts_known", json_integer(count));

	for (; host && !err; host = host->next) {
		json_t *entry = json_object();

		err = json_object_set_new(hosts, host->name, entry);
		err |= set(entry, "attempts", &host->attempts);
		err |= set(entry, "failures", &host->failures);
		err |= set(entry, "bytes", &host->bytes);
		err |= set(entry, "in_flight", &host->in_flight);
		err |= set(entry, "openings", &host->openings);
		err |= json_object_set_new(entry, "open",
					   json_boolean(relaxed_load(&host->is_open)));
	}
	return err;
}

void disk_note(struct core *core, unsigned disk, int err)
{
	struct disk_error *error = &core->disks[disk];

	if (err)
		relaxed_store(&error->at_ns, clock_now_ns());
	relaxed_store(&error->err, err);
}

/* What it lacks is named as in docs/design/threat-model.md. */
static int add_process(json_t *stats, const struct core *core)
{
	const struct process_counts *counts = &core->fetcher->processes;
	json_t *lacks = json_array();
	json_t *process = json_pack("{s:b, s:o}", "running", (int)relaxed_load(&counts->running),
				    "lacks", lacks);
	int err = json_object_set_new(stats, "process", process);

	for (unsigned i = 0; i < CHANNEL_LACKS && !err; i++) {
		if (relaxed_load(&counts->lacks) & 1u << i)
			err = json_array_append_new(lacks, json_string(channel_lack_names[i]));
	}
	if (!err)
		err = set(process, "started", &counts->started);
	if (!err)
		err = set(process, "died", &counts->died);
	return err ?: set(process, "failed", &counts->failed);
}

static int add_disk_errors(json_t *stats, const struct core *core)
{
	static const char *const names[] = { [DISK_OF_MAP] = "map", [DISK_OF_CACHE] = "cache" };
	json_t *errors = json_object();
	int err = json_object_set_new(stats, "disk_errors", errors);

	for (unsigned i = 0; i < DISKS && !err; i++) {
		int found = (int)relaxed_load(&core->disks[i].err);
		double age_s = (double)(clock_now_ns() - relaxed_load(&core->disks[i].at_ns)) /
			       (double)NS_PER_S;

		if (found)
			err = json_object_set_new(errors, names[i],
						  json_pack("{s:s, s:f}", "errno",
							    strerrorname_np(-found) ?: "EIO",
							    "age_s", age_s));
	}
	return err;
}

json_t *fetchstats_json(struct core *core)
{
	const struct fetch_counts *counts = &core->counts;
	const struct {
		const char *key;
		const uint64_t *number;
	} numbers[] = {
		{ "reads", &counts->reads },
		{ "read_errors", &counts->read_errors },
		{ "deadlines_missed", &counts->deadlines_missed },
		{ "failed_source", &counts->failed_source },
		{ "attempts", &counts->attempts },
		{ "retries", &counts->retries },
		{ "whole_answers", &counts->whole_answers },
		{ "whole_units", &counts->whole_units },
		{ "units_fetched", &counts->units_fetched },
		{ "bytes_fetched", &counts->bytes_fetched },
		{ "coded_bytes_fetched", &counts->coded_bytes_fetched },
		{ "units_prefetched", &counts->units_prefetched },
		{ "units_verified", &counts->units_verified },
		{ "units_pinned", &counts->units_pinned },
		{ "units_from_cache", &counts->units_from_cache },
		{ "units_stored", &counts->units_stored },
		{ "store_failures", &counts->store_failures },
		{ "store_drops", &counts->store_drops },
		{ "reads_waiting", &counts->reads_waiting },
		{ "units_queued", &counts->units_queued },
		{ "units_in_flight", &counts->units_in_flight },
		{ "buffer_bytes", &counts->buffer_bytes },
		{ "unstored_bytes", &counts->unstored_bytes },
	};
	json_t *stats = json_object();
	int err = stats ? 0 : -1;

	for (unsigned i = 0; i < sizeof(numbers) / sizeof(*numbers) && !err; i++)
		err = set(stats, numbers[i].key, numbers[i].number);
	if (!err)
		err = add_failures(stats, counts);
	if (!err)
		err = add_hosts(stats, core);
	if (!err)
		err = add_process(stats, core);
	if (!err)
		err = add_disk_errors(stats, core);
	if (!err)
		err = json_object_set_new(stats, "latencies", latencies_json(&core->latencies));
	if (!err)
		return stats;
	json_decref(stats);
	return NULL;
}
