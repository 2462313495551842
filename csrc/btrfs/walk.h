/* SPDX-License-Identifier: MIT */
/* Walks the blocks of trees, for code that checks or changes whole blocks. */
#pragma once

#include "btrfs/block.h"
#include "btrfs/reader.h"

/* The blocks that a walk has visited. All zero means empty. */
struct block_set {
	struct block_expect *slots; /* open addressing; an unused slot has bytenr 0 */
	size_t count;
	size_t capacity; /* a power of two, or 0 */
};

void block_set_deinit(struct block_set *set);
/* Returns the entry with this address, or NULL. */
const struct block_expect *block_set_find(const struct block_set *set, uint64_t bytenr);
/* Returns 0 or -ENOMEM. */
int block_set_add(struct block_set *set, const struct block_expect *expect);

struct walk {
	struct reader *reader;
	/* Subvolumes share blocks; with a set, which outlives one walk, each is visited once. */
	struct block_set *visited;
	/*
	 * Called with each verified block, a node before its children. The block may be changed
	 * (and written: reader_write_block()), but not its list of children. Negative: stop.
	 */
	int (*visit)(struct walk *walk, const struct block_expect *expect, void *block);
	/*
	 * Called where a block cannot be read or used; 0: go on with the next one. NULL: stop.
	 * reader->error says what is wrong. -ENOMEM always stops.
	 */
	int (*damaged)(struct walk *walk, const struct block_expect *expect, int error_number);
	void *context;
};

/* Visits `root` and all blocks below it. Returns 0, or the error that stopped it. */
int tree_walk(struct walk *walk, const struct block_expect *root);
