/* SPDX-License-Identifier: MIT */
/*
 * Builds a tree bottom-up from items that come in the order of their keys. It keeps one block per
 * level in memory. Each full block goes to a sink, which chooses its address.
 *
 * A tree can be built upon an earlier one, as a snapshot that has changed: its blocks begin at the
 * keys where the earlier one's do, and one that would be equal to its counterpart is not written,
 * but shared. Roots are not shared, as the kernel relies on it (btrfs_block_can_be_shared).
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>

#include "btrfs/csum.h"
#include "btrfs/format.h"
#include "btrfs/key.h"

/* The properties that all blocks of a file system share. */
struct tree_format {
	uint32_t node_bytes;
	uint64_t generation;
	uint8_t fsid[UUID_BYTES];
	uint8_t chunk_tree_uuid[UUID_BYTES];
	const struct csum_kind *csum;
};

struct tree_sink {
	/* Choose the logical address of the next block, which is at `level`. */
	int (*place)(void *context, unsigned level, uint64_t *bytenr);
	/* Take a finished block. NULL: the tree is only measured, and blocks get no checksum. */
	int (*write)(void *context, uint64_t bytenr, const void *block);
	/* Compare a block, which has no header yet, with a written one. */
	int (*compare)(void *context, uint64_t bytenr, const void *block, bool *is_same);
	void *context;
};

/* The blocks of a finished tree, without its root, level by level in the order of their keys. */
struct tree_shape {
	struct tree_blocks {
		struct tree_place {
			struct key first;
			uint64_t bytenr;
		} * places;
		size_t count;
		size_t capacity;
	} levels[TREE_LEVELS];
};

void tree_shape_deinit(struct tree_shape *shape);

/* Where a finished tree is found. */
struct tree_root {
	uint64_t bytenr;
	uint64_t block_count;
	uint8_t level;
};

struct tree_level {
	uint8_t *block;
	uint32_t count;	   /* items or pointers in `block` */
	uint32_t data_end; /* leaf: where the data of the last item starts */
	size_t next;	   /* the first block of the earlier tree that begins behind `block` */
	/* The block of the earlier tree that `block` may be equal to, or NULL. */
	const struct tree_place *candidate;
};

struct tree_builder {
	const struct tree_format *format;
	const struct tree_sink *sink;
	uint64_t owner;
	struct tree_level levels[TREE_LEVELS];
	unsigned level_count;
	struct key last_key;
	bool has_items;
	uint64_t block_count;
	/* May be set before the first item: the tree to build upon, and what is filled. */
	const struct tree_shape *earlier;
	struct tree_shape *shape;
};

/* `format` and `sink` must outlive the builder. Returns 0 or -ENOMEM. */
int tree_builder_init(struct tree_builder *tree, const struct tree_format *format,
		      const struct tree_sink *sink, uint64_t owner);
void tree_builder_deinit(struct tree_builder *tree);

/*
 * Appends an item. -EINVAL: `key` is not greater than the one before; -E2BIG: it fits in no leaf;
 * -EFBIG: the tree would be higher than TREE_LEVELS; else what the sink returned.
 */
int tree_add(struct tree_builder *tree, const struct key *key, const void *data, size_t size);

/* Writes all open blocks. A tree without items is one empty leaf. */
int tree_finish(struct tree_builder *tree, struct tree_root *root);

/* Returns the size of the largest item that fits in a leaf. */
static inline size_t tree_item_max_bytes(const struct tree_format *format)
{
	return format->node_bytes - sizeof(struct disk_header) - sizeof(struct disk_item);
}
