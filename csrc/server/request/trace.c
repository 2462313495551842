/* SPDX-License-Identifier: MIT */
/*
 * trace-start records first reads of blocks, at most `"limit"` of them. The reply has `"id"`. In
 * request and reply, `"unit"` says how many bytes a block has. Clients of version 0.1.0 do not give
 * it, and would take the numbers of blocks for those of the source's units.
 *
 * trace-read returns the reads of recording `"id"` from number `"from"` on: `"reads"`, a list of
 * [SOURCE, BLOCK, MILLISECONDS], and `"units"`, `"limit"`, `"lost"` and `"seconds"` of the recording
 * so far. With `"stop": true`, the recording ends once all was read. If no client asks for half a
 * minute, it ends with the next read.
 */
#include <errno.h>

#include "base/clock.h"
#include "base/keys.h"
#include "lazy/trace.h"
#include "server/request/request.h"

enum { PAGE_READS = 2000 };

static int start(struct map_request *request)
{
	struct error *error = &request->error;
	uint64_t limit = TRACE_BLOCKS_DEFAULT, unit = 0, id = 0;
	int err = keys_take_u64(request->keys, "limit", false, &limit, error);

	if (!err)
		err = keys_take_u64(request->keys, "unit", false, &unit, error);
	if (!err)
		err = keys_refuse_unknown(request->keys, error);
	if (!err && (!limit || limit > TRACE_BLOCKS_MAX))
		err = error_set(error, -EINVAL, "\"limit\" is %llu, it must be 1 to %d",
				(unsigned long long)limit, TRACE_BLOCKS_MAX);
	if (!err && unit != TRACE_BLOCK_BYTES) {
		error_set_hint(error, "record with the version of the server, which is %s",
			       BTRFS_UBLK_VERSION);
		err = error_set(
			error, -EINVAL,
			"this server notes blocks of %d bytes, which the client does not know",
			TRACE_BLOCK_BYTES);
	}
	if (!err)
		err = trace_start(&request->space->trace, limit, &id);
	if (err == -EBUSY) {
		error_set_hint(error, "wait until it is over");
		err = error_set(error, err, "another recording of first reads is running");
	}
	if (err)
		return err;
	if (json_object_set_new(request->body, "id", json_integer((json_int_t)id)) ||
	    json_object_set_new(request->body, "unit", json_integer(TRACE_BLOCK_BYTES)))
		return -ENOMEM;
	return 0;
}

MAP_REQUEST(trace_start_kind, "trace-start", start);

static int answer(struct map_request *request, const struct trace_entry *entries, int count,
		  const struct trace_status *status)
{
	json_t *reads = json_array();
	json_t *more = json_pack("{s:o, s:I, s:I, s:I, s:f}", "reads", reads, "units",
				 (json_int_t)status->blocks, "limit", (json_int_t)status->limit,
				 "lost", (json_int_t)status->lost, "seconds",
				 (double)status->elapsed_ns / 1e9);
	int err = more ? 0 : -ENOMEM;

	for (int i = 0; i < count && !err; i++) {
		if (json_array_append_new(reads,
					  json_pack("[I, I, I]", (json_int_t)entries[i].source,
						    (json_int_t)entries[i].block,
						    (json_int_t)(entries[i].at_ns / NS_PER_MS))))
			err = -ENOMEM;
	}
	if (!err && json_object_update(request->body, more))
		err = -ENOMEM;
	json_decref(more);
	return err;
}

static int read_page(struct map_request *request)
{
	struct trace *trace = &request->space->trace;
	struct trace_entry entries[PAGE_READS];
	struct trace_status status;
	uint64_t id = 0, from = 0;
	bool stop = false;
	int count, err = keys_take_u64(request->keys, "id", true, &id, &request->error);

	if (!err)
		err = keys_take_u64(request->keys, "from", false, &from, &request->error);
	if (!err)
		err = keys_take_bool(request->keys, "stop", &stop, &request->error);
	if (!err)
		err = keys_refuse_unknown(request->keys, &request->error);
	if (err)
		return err;
	count = trace_read(trace, id, from, entries, PAGE_READS, &status);
	if (count < 0)
		return error_set(&request->error, count, "recording %llu is over",
				 (unsigned long long)id);
	if (stop && count < PAGE_READS)
		trace_stop(trace, id);
	return answer(request, entries, count, &status);
}

MAP_REQUEST(trace_read_kind, "trace-read", read_page);
