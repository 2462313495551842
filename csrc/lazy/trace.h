/* SPDX-License-Identifier: MIT */
/*
 * A recording of first reads: which units readers asked for since it began, in order, whether they
 * were cached or not. Workers note, without a lock; its memory is fixed when it begins.
 */
#ifndef LAZY_TRACE_H
#define LAZY_TRACE_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/relaxed.h"
#include "lazy/source.h"

enum {
	TRACE_UNITS_DEFAULT = 1 << 17,
	TRACE_UNITS_MAX = 1 << 20, /* 40 MiB */
	/* One that nobody has asked for so long ends, with the next read: its client is gone. */
	TRACE_LEASE_S = 30,
};

struct trace_entry {
	uint64_t source; /* its number */
	uint64_t unit;
	uint64_t at_ns; /* since it began, and 1; atomic: 0 until the rest is there */
};

struct trace_log;

struct trace {
	pthread_mutex_t lock;  /* of who begins, reads and ends it */
	struct trace_log *log; /* atomic; NULL: none is on */
	unsigned noting;       /* atomic: threads that use `log` */
	uint64_t id;	       /* of the last one, from 1 */
	uint64_t lease_ns;     /* TRACE_LEASE_S; tests change it before any is on */
};

struct trace_status {
	uint64_t units, limit; /* in the log */
	uint64_t lost; /* reads of units that it had no room for; one unit may count often */
	uint64_t elapsed_ns;
};

void trace_init(struct trace *trace);
/* Nobody notes any more. */
void trace_deinit(struct trace *trace);

/* Returns 0, -EBUSY: another one is on, or -ENOMEM. `limit`: units, at most TRACE_UNITS_MAX. */
int trace_start(struct trace *trace, uint64_t limit, uint64_t *id);
/*
 * Copies at most `room` entries from number `from` on, and says how many: fewer, when there are no more
 * yet. Returns that, or -ESTALE: that recording is over.
 */
int trace_read(struct trace *trace, uint64_t id, uint64_t from, struct trace_entry *entries,
	       unsigned room, struct trace_status *status);
void trace_stop(struct trace *trace, uint64_t id);

void trace_note_units(struct trace *trace, const struct source *source, uint64_t first,
		      uint64_t last);

/* A reader asks for bytes of a source that is not computed. Any thread. */
static inline void trace_note(struct trace *trace, const struct source *source, uint64_t offset,
			      uint64_t length)
{
	if (__builtin_expect(relaxed_load(&trace->log) != NULL, 0))
		trace_note_units(trace, source, offset / source->unit_bytes,
				 (offset + length - 1) / source->unit_bytes);
}

#endif
