/* SPDX-License-Identifier: MIT */
/* Reads tree blocks, and verifies each before anything in it is used. */
#pragma once

#include "btrfs/reader.h"

enum { BLOCK_NAME_BYTES = 96 };

/* "extent tree, leaf at 30490624" */
const char *block_name(const struct block_expect *expect, char text[static BLOCK_NAME_BYTES]);

/*
 * Checks that a block of node_bytes is the expected one, so that walks need not check its headers
 * again: checksum, address, fsid, chunk tree UUID, owner, level, generation; item count; keys in
 * order and within the bounds of the pointer; item data within the block, without gap or overlap
 * (check_leaf and check_node in the kernel's tree-checker.c ask for the same).
 *
 * NB: walks are finite only because of the bounds on keys: as all keys of a tree rise, no block
 * can be in it twice.
 */
int block_verify(struct reader *reader, const struct block_expect *expect, const void *block);

/* Read a tree block of node_bytes (its first copy) and verify it. */
int reader_read_block(struct reader *reader, const struct block_expect *expect, void *block);

/*
 * Updates the checksum of a changed tree block and writes all its copies back. `fd` is the same
 * image or device, writable. Returns -EINVAL if it is not the block of that address.
 */
int reader_write_block(struct reader *reader, int fd, uint64_t bytenr, void *block);

/* Returns how many items or pointers a verified block has. */
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

/* Returns what a pointer says about the block it leads to; `expect` is for the node itself. */
struct block_expect block_child(const struct block_expect *expect, const void *node, uint32_t slot);

/* Returns the key in a slot of a leaf or node. */
struct key block_key(const void *block, uint32_t slot);
