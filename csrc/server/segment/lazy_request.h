/* SPDX-License-Identifier: MIT */
/* A read of a lazy segment: finds its mappings, and where to read each of them. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "lazy/complete.h"
#include "server/segment.h"
#include "server/segment/read_ahead.h"

struct lazy_segment {
	char *map_path;
	char *cache_path;
	uint64_t map_offset;
	bool unmapped_zero;
	uint64_t deadline_ns; /* of a read; 0: none */
	struct complete_options complete;
	struct space *space;
	const struct mapping *last; /* atomic: the last mapping that was found, or NULL */
	struct read_ahead read_ahead;
};

/* As segment_ops.read and segment_ops.complete. */
int lazy_request_begin(struct segment *segment, struct io *io);
int lazy_request_complete(struct segment *segment, struct io *io, int result);
