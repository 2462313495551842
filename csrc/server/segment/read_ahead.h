/* SPDX-License-Identifier: MIT */
/* Readers that go through a source in order get what comes next fetched before they ask. */
#ifndef SEGMENT_READ_AHEAD_H
#define SEGMENT_READ_AHEAD_H

#include <stdbool.h>
#include <stdint.h>

struct fetcher;
struct mapping;
struct source;

enum { READ_AHEAD_STREAMS = 16 };

/* One reader, or several that stay close together. */
struct read_ahead_stream {
	const struct source *source; /* NULL: unused */
	uint64_t start,
		next;	 /* bytes, in the source: where the first read began, the furthest ended */
	uint64_t read;	 /* bytes, in all of its reads */
	uint64_t ahead;	 /* up to where it was asked for */
	uint64_t window; /* bytes */
	uint64_t used;	 /* when; the least is replaced */
};

/* Zeroed at first. */
struct read_ahead {
	bool taken; /* atomic: by one of the worker threads */
	uint64_t clock;
	struct read_ahead_stream streams[READ_AHEAD_STREAMS];
};

/*
 * [offset, offset + length) of the mapping's source is being read. Any thread; never waits: when another
 * one is at it, nothing happens.
 */
void read_ahead(struct read_ahead *state, struct fetcher *fetcher, const struct mapping *mapping,
		uint64_t offset, uint32_t length);

#endif
