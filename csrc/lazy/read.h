/* SPDX-License-Identifier: MIT */
/* Reads: each subscribes to its units, and has a deadline. */
#pragma once

#include <stdint.h>

#include "lazy/core.h"

/* A unit that a read waits for. */
struct read_unit {
	struct subscription subscription;
	struct lazy_read *read;
};

/*
 * A read that the cache could not answer. The caller owns it, and keeps it until done() is called.
 */
struct lazy_read {
	/* Set by the caller. */
	struct source *source; /* not computed */
	/* bytes, in the source; the read ends within the source's last block of 4 KiB */
	uint64_t offset;
	uint32_t length; /* bytes */
	uint8_t *data;
	/* The caller can do with verified bytes that are elsewhere, and need not be copied. */
	bool in_place;
	uint64_t deadline_ns; /* CLOCK_MONOTONIC */
	/*
	 * Called once, on any thread. `result` is 0, and `found` is verified, or a negative errno.
	 */
	void (*done)(struct lazy_read *read, int result);

	/* `data`, which was filled; or, with `in_place`, perhaps what stays until done() returns. */
	const uint8_t *found;

	/* The fetcher's own. */
	struct completion sent;
	struct core *core;
	struct timer deadline;
	uint64_t began_ns;
	struct link link;
	struct read_unit only, *units; /* most reads have one unit */
	unsigned count, left;
};

/* Begins a read, on the thread that has the core; it may end at once. */
void read_begin(struct core *core, struct lazy_read *read);
/* Has the fetcher's thread begin it. Any thread may call this; it never waits. */
void read_send(struct core *core, struct lazy_read *read);
/* Fails all reads that wait, on the fetcher's thread. */
void reads_fail_all(struct core *core, int err);
