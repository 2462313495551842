/* SPDX-License-Identifier: MIT */
/*
 * Hands out the tree blocks of the given ranges (block groups), from front to end.
 *
 * NB: the last block of every range is never handed out. So each range always ends in exactly one
 * free extent, and the size of the free-space tree does not depend on how many blocks are taken.
 * The fixpoint in commit.c converges only because of this.
 */
#pragma once

#include <stddef.h>
#include <stdint.h>

struct block_range {
	uint64_t start;
	uint64_t length;
};

struct block_alloc {
	uint32_t node_bytes;
	struct block_range *ranges;
	size_t range_count;
	/* Where the next block comes from. */
	size_t range;
	uint64_t offset;
};

/* A position for block_alloc_rewind(). */
struct block_alloc_mark {
	size_t range;
	uint64_t offset;
};

void block_alloc_init(struct block_alloc *alloc, uint32_t node_bytes);
void block_alloc_deinit(struct block_alloc *alloc);

/* Ranges are used in the order in which they are added. Returns 0 or -ENOMEM. */
int block_alloc_add_range(struct block_alloc *alloc, uint64_t start, uint64_t length);

/* Shortens the range at `start`, if there is one. Nothing behind `length` may be in use. */
void block_alloc_trim(struct block_alloc *alloc, uint64_t start, uint64_t length);

/* Sets the next block's logical address. Returns 0, or -ENOSPC when all ranges are full. */
int block_alloc_take(struct block_alloc *alloc, uint64_t *bytenr);

struct block_alloc_mark block_alloc_mark(const struct block_alloc *alloc);
/* Give back everything that was taken since `mark`. */
void block_alloc_rewind(struct block_alloc *alloc, struct block_alloc_mark mark);
