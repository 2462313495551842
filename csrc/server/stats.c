/* SPDX-License-Identifier: MIT */
#include "server/stats.h"

#include "base/histogram_json.h"
#include "server/segment.h"

static int add_to(json_t *object, const char *key, uint64_t amount)
{
	json_int_t before = json_integer_value(json_object_get(object, key));

	return json_object_set_new(object, key, json_integer(before + (json_int_t)amount));
}

static int add_counters(json_t *object, const struct counters *counters)
{
	static const char *const requests[IO_OP_COUNT] = {
		[IO_OP_READ] = "reads",
		[IO_OP_WRITE] = "writes",
		[IO_OP_FLUSH] = "flushes",
		[IO_OP_DISCARD] = "discards",
		[IO_OP_WRITE_ZEROES] = "write_zeroes",
	};
	static const char *const bytes[IO_OP_COUNT] = {
		[IO_OP_READ] = "read_bytes",
		[IO_OP_WRITE] = "write_bytes",
		[IO_OP_DISCARD] = "discard_bytes",
		[IO_OP_WRITE_ZEROES] = "write_zeroes_bytes",
	};
	int err = add_to(object, "errors", counters->errors);

	for (unsigned op = 0; op < IO_OP_COUNT && !err; op++) {
		err = add_to(object, requests[op], counters->requests[op]);
		if (!err && bytes[op])
			err = add_to(object, bytes[op], counters->bytes[op]);
	}
	return err;
}

static int add_latency(json_t *object, const struct histogram *latency)
{
	static const char *const names[LATENCY_GROUPS] = {
		[LATENCY_READS] = "reads",
		[LATENCY_WRITES] = "writes",
		[LATENCY_FLUSHES] = "flushes",
	};
	json_t *groups = json_object();
	int err = json_object_set_new(object, "latency", groups);

	for (unsigned i = 0; i < LATENCY_GROUPS && !err; i++) {
		if (histogram_count(&latency[i]))
			err = json_object_set_new(groups, names[i], histogram_json(&latency[i]));
	}
	return err;
}

static int add_queues(json_t *object, const struct engine *engine)
{
	json_t *queues = json_array();
	int err = json_object_set_new(object, "queues", queues);

	for (unsigned i = 0; i < engine->worker_count && !err; i++) {
		const struct worker_stats *stats = engine->workers[i].stats;

		if (!stats)
			continue;
		err = json_array_append_new(
			queues,
			json_pack("{s:I, s:I}", "in_flight",
				  (json_int_t)worker_stats_in_flight(stats), "max_in_flight",
				  (json_int_t)relaxed_load(&stats->max_in_flight)));
	}
	return err;
}

/* They belong to no kind, so the sum over the kinds lacks them. */
static int add_refused(json_t *stats, const struct engine *engine)
{
	uint64_t refused = engine_count_refused(engine);

	return add_to(stats, "refused", refused) | add_to(stats, "errors", refused);
}

/* Kinds add their own statistics through their first segments. */
static int add_own(json_t *stats, const struct engine *engine)
{
	unsigned kinds = 0;
	int err = 0;

	/* Kinds are numbered by their first segments. */
	for (unsigned i = 0; i < engine->segment_count && kinds < engine->kind_count; i++) {
		const struct segment *segment = &engine->segments[i];

		if (segment->kind < kinds)
			continue;
		kinds++;
		if (segment->ops->add_stats && !err)
			err = segment->ops->add_stats(segment, stats);
	}
	return err;
}

json_t *stats_json(const struct engine *engine)
{
	json_t *stats = json_object();
	json_t *kinds = json_object();
	int err = json_object_set_new(stats, "kinds", kinds);

	for (unsigned i = 0; i < engine->kind_count && !err; i++) {
		json_t *kind = json_object();
		struct kind_stats sum;

		err = json_object_set_new(kinds, engine->kinds[i]->name, kind);
		engine_count(engine, i, &sum);
		if (!err)
			err = add_counters(kind, &sum.counters);
		if (!err)
			err = add_latency(kind, sum.latency);
		if (!err)
			err = add_counters(stats, &sum.counters);
	}
	if (!err)
		err = add_refused(stats, engine);
	if (!err)
		err = add_queues(stats, engine);
	if (!err)
		err = add_own(stats, engine);
	if (!err)
		return stats;
	json_decref(stats);
	return NULL;
}
