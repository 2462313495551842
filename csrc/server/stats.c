/* SPDX-License-Identifier: MIT */
#include "server/stats.h"

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

json_t *stats_json(const struct engine *engine)
{
	json_t *stats = json_object();
	json_t *kinds = json_object();
	int err = json_object_set_new(stats, "kinds", kinds);

	for (unsigned i = 0; i < engine->kind_count && !err; i++) {
		json_t *kind = json_object();
		struct counters sum;

		err = json_object_set_new(kinds, engine->kinds[i]->name, kind);
		engine_count(engine, i, &sum);
		if (!err)
			err = add_counters(kind, &sum);
		if (!err)
			err = add_counters(stats, &sum);
	}
	if (!err)
		return stats;
	json_decref(stats);
	return NULL;
}
