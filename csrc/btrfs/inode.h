/* SPDX-License-Identifier: MIT */
/*
 * The items that files and directories consist of. In a tree that holds files, the items of one
 * inode come in this order: inode, back references, directory entries by hash, directory entries
 * by index, file extents.
 */
#ifndef BTRFS_INODE_H
#define BTRFS_INODE_H

#include <stddef.h>

#include "btrfs/extents.h"
#include "btrfs/tree.h"

/* The first index that a directory gives to an entry; "." and ".." have 0 and 1. */
enum { DIR_INDEX_FIRST = 2 };

/* An inode with one link, owned by root, all of whose times are `time` (seconds since 1970). */
struct disk_inode inode_make(uint64_t generation, int64_t time, uint32_t mode);
struct disk_time time_make(int64_t seconds);

int inode_add(struct tree_builder *tree, uint64_t inode_number, const struct disk_inode *inode);

/* Adds the inode's name in `parent`. A subvolume's top directory is its own parent, as "..". */
int inode_ref_add(struct tree_builder *tree, uint64_t inode_number, uint64_t parent, uint64_t index,
		  const char *name);

/*
 * Adds an entry of directory `parent` that leads to `target`, found by the name's hash or by index.
 * Returns -ENAMETOOLONG for names of more than NAME_MAX_BYTES.
 *
 * NB: two names of one directory with the same hash belong into one item. This library cannot
 * write such items yet, so tree_add refuses the second name with -EINVAL.
 */
int dir_item_add(struct tree_builder *tree, uint64_t parent, const char *name,
		 const struct key *target, uint8_t entry_type);
int dir_index_add(struct tree_builder *tree, uint64_t parent, uint64_t index, const char *name,
		  const struct key *target, uint8_t entry_type);

/* btrfs_name_hash */
uint64_t dir_name_hash(const char *name, size_t length);

/* Adds an uncompressed regular file extent: [file_offset, +bytes) is all of `disk_bytenr`'s. */
int file_extent_add(struct tree_builder *tree, uint64_t inode_number, uint64_t file_offset,
		    uint64_t disk_bytenr, uint64_t bytes);

#endif
