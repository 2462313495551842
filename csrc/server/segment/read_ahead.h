/* SPDX-License-Identifier: MIT */
/* For sequential readers, fetches what comes next before they ask for it. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

struct fetcher;
struct mapping;
struct source;

enum { READ_AHEAD_STREAMS = 16 };

/* One reader, or several that stay near each other. */
struct read_ahead_stream {
	const struct source *source; /* NULL: unused */
	uint64_t start,
		next;  /* bytes, in the source: the start of the first read, and the furthest end */
	uint64_t read; /* bytes, about the sum of all its reads */
	uint64_t ahead;	 /* the end of what was requested in advance */
	uint64_t window; /* bytes */
	uint64_t used;	 /* when it was last used; the oldest one is replaced */
};

/* Must be zeroed at first. */
struct read_ahead {
	bool taken; /* atomic: a worker is using it */
	uint64_t clock;
	struct read_ahead_stream streams[READ_AHEAD_STREAMS];
};

/*
 * To be called when [offset, offset + length) of the mapping's source is being read; where that is
 * `cached`, only when it ends the unit in which it begins. Any thread may call this. It never waits:
 * nothing happens when another thread is using `state`.
 */
void read_ahead(struct read_ahead *state, struct fetcher *fetcher, const struct mapping *mapping,
		uint64_t offset, uint32_t length, bool cached);
