/* SPDX-License-Identifier: MIT */
/* Tree blocks as they are read: verified before anything in them is used. */
#ifndef BTRFS_BLOCK_H
#define BTRFS_BLOCK_H

#include "btrfs/reader.h"

enum { BLOCK_NAME_BYTES = 96 };

/* "extent tree, leaf at 30490624" */
const char *block_name(const struct block_expect *expect, char text[static BLOCK_NAME_BYTES]);

/*
 * That a block of node_bytes is the expected one and can be walked without further checks of its
 * headers: checksum, address, fsid, chunk tree UUID, owner, level, generation; item count; keys in
 * order and within the bounds of the pointer; item data within the block, without gap or overlap
 * (check_leaf and check_node in the kernel's tree-checker.c ask for the same).
 *
 * NB: the bounds on keys are what keeps walks finite: as all keys of a tree rise, no block can
 * stand in it twice.
 */
int block_verify(struct reader *reader, const struct block_expect *expect, const void *block);

/* Of a verified block. */
static inline uint32_t block_count(const void *block)
{
	return le32toh(((const struct disk_header *)block)->item_count);
}

static inline struct disk_item *block_item(void *leaf, uint32_t slot)
{
	return (struct disk_item *)((struct disk_header *)leaf + 1) + slot;
}

static inline uint8_t *block_item_data(void *leaf, const struct disk_item *item)
{
	return (uint8_t *)((struct disk_header *)leaf + 1) + le32toh(item->offset);
}

/* What a pointer says of the block it leads to; `expect` is the node's own. */
struct block_expect block_child(const struct block_expect *expect, const void *node, uint32_t slot);

/* The key in a slot of a leaf or node. */
struct key block_key(const void *block, uint32_t slot);

#endif
