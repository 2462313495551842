/* SPDX-License-Identifier: MIT */
/*
 * A recording of first reads: which blocks readers have asked for since it began, in order, cached
 * or not. Blocks are smaller than units, which have much that nobody has read. Queue threads add to
 * it without a lock. Its memory is allocated when it begins.
 */
#pragma once

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/relaxed.h"
#include "content/source.h"

enum {
	TRACE_BLOCK_BYTES = 4 << 10,
	TRACE_BLOCKS_DEFAULT = 1 << 19, /* 20 MiB */
	TRACE_BLOCKS_MAX = 1 << 22,
	/* A recording that no client has read for so long ends with the next read. */
	TRACE_LEASE_S = 30,
};

struct trace_entry {
	uint64_t source; /* number of the source */
	uint64_t block;
	/* time since it began, plus 1; atomic: 0 until the other fields are written */
	uint64_t at_ns;
};

struct trace_log;

struct trace {
	pthread_mutex_t lock;  /* for threads that begin, read and end it */
	struct trace_log *log; /* atomic; NULL: none is running */
	unsigned noting;       /* atomic: number of threads that use `log` */
	uint64_t id;	       /* of the last recording, from 1 */
	uint64_t lease_ns;     /* TRACE_LEASE_S; only tests change it, before any recording */
};

struct trace_status {
	uint64_t blocks, limit; /* in the log */
	uint64_t lost;		/* first reads that did not fit; a block may count several times */
	uint64_t elapsed_ns;
};

void trace_init(struct trace *trace);
/* To be called when no thread adds to it any more. */
void trace_deinit(struct trace *trace);

/*
 * Starts a recording of at most `limit` blocks, up to TRACE_BLOCKS_MAX. Returns 0, -EBUSY when one
 * is running, or -ENOMEM.
 */
int trace_start(struct trace *trace, uint64_t limit, uint64_t *id);
/*
 * Copies at most `room` entries from number `from` on. Returns how many it has copied, or -ESTALE
 * when that recording is over.
 */
int trace_read(struct trace *trace, uint64_t id, uint64_t from, struct trace_entry *entries,
	       unsigned room, struct trace_status *status);
void trace_stop(struct trace *trace, uint64_t id);

void trace_note_blocks(struct trace *trace, const struct source *source, uint64_t offset,
		       uint64_t length);

/*
 * To be called when a reader asks for bytes of a source that is not computed. Any thread may call
 * this.
 */
static inline void trace_note(struct trace *trace, const struct source *source, uint64_t offset,
			      uint64_t length)
{
	if (__builtin_expect(relaxed_load(&trace->log) != NULL, 0))
		trace_note_blocks(trace, source, offset, length);
}
