/* SPDX-License-Identifier: MIT */
/*
 * Bytes of compressed objects that more than one range needs: what lies between two points of an
 * index is decoded from the first one on, whichever part of it is wanted. A few are kept, those that
 * were needed last, until they were not needed for some seconds. Only for the fetcher's thread.
 */
#pragma once

#include <stdint.h>

#include "base/list.h"

struct uv_loop_s;
struct uv_timer_s;

struct kept {
	struct link entries; /* the one that was needed last comes last */
	uint64_t bytes;
	struct uv_timer_s *timer; /* NULL: there is none, and nothing is kept */
	void (*closed)(struct kept *kept);
};

/* Bytes of an object, as a mirror has it. */
struct kept_range {
	uint64_t source; /* its ID */
	unsigned mirror; /* its number */
	uint64_t offset;
	uint32_t length;
};

void kept_open(struct kept *kept, struct uv_loop_s *loop);
/* Frees all; `closed` is called, perhaps later, when `kept` is not needed any more. */
void kept_close(struct kept *kept, void (*closed)(struct kept *kept));

/* Keeps a copy of `data`, if it is not too large. */
void kept_add(struct kept *kept, const struct kept_range *range, const uint8_t *data);
/* Copies the first bytes of a range to `data`, as many as are kept. Returns how many. */
uint32_t kept_beginning(struct kept *kept, const struct kept_range *range, uint8_t *data);
/* Copies its last ones, but none of the first `from`, to where they belong in `data`. */
uint32_t kept_end(struct kept *kept, const struct kept_range *range, uint32_t from, uint8_t *data);
/* Forgets what is kept of a range. */
void kept_drop(struct kept *kept, const struct kept_range *range);
