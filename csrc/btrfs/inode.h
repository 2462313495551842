/* SPDX-License-Identifier: MIT */
/*
 * The items that files and directories consist of. In a tree that holds files, the items of one
 * inode come in this order: inode, back references (names), extended attributes, directory entries
 * by hash, directory entries by index, file extents. So the functions here are called in this
 * order, once for each inode, but file_extent_add() for each extent.
 */
#pragma once

#include <stddef.h>

#include "btrfs/extents.h"
#include "btrfs/tree.h"

/* The first index that a directory gives to an entry; "." and ".." have 0 and 1. */
enum { DIR_INDEX_FIRST = 2 };

/* An inode with one link, owned by root, all of whose times are `time` (seconds since 1970). */
struct disk_inode inode_make(uint64_t generation, int64_t time, uint32_t mode);
struct disk_time time_make(int64_t seconds, uint32_t nanoseconds);

int inode_add(struct tree_builder *tree, uint64_t inode_number, const struct disk_inode *inode);

/* One of an inode's names. */
struct inode_name {
	uint64_t parent; /* inode number of the directory */
	uint64_t index;	 /* of the entry there */
	const char *name;
	size_t length; /* up to NAME_MAX_BYTES */
};

/*
 * Adds all names of an inode, and sorts `names` meanwhile. Names of one directory share an item;
 * those for which that has no room get items of their own (extended references).
 */
int inode_names_add(struct tree_builder *tree, uint64_t inode_number, struct inode_name *names,
		    size_t count);

/* Adds ".." of a subvolume's top directory, which is its own parent. */
int inode_top_add(struct tree_builder *tree, uint64_t inode_number);

/* An entry of a directory, or an extended attribute. */
struct dir_entry {
	const char *name;
	size_t length;	   /* up to NAME_MAX_BYTES */
	struct key target; /* entries: where it leads to */
	uint64_t index;	   /* entries: from DIR_INDEX_FIRST on */
	const void *value; /* attributes */
	size_t value_bytes;
	uint8_t type;  /* ENTRY_* */
	uint64_t hash; /* set by the functions below */
};

/*
 * Add all entries of a directory, or all attributes of an inode, and sort `entries` meanwhile.
 * Names with the same hash share an item. -E2BIG: that is larger than a leaf; -ENAMETOOLONG.
 */
int dir_entries_add(struct tree_builder *tree, uint64_t directory, struct dir_entry *entries,
		    size_t count);
int xattrs_add(struct tree_builder *tree, uint64_t inode_number, struct dir_entry *entries,
	       size_t count);
/* Adds entries by hash only, as the root tree's directory has them. */
int dir_hashes_add(struct tree_builder *tree, uint64_t directory, struct dir_entry *entries,
		   size_t count);

/* btrfs_name_hash */
uint64_t dir_name_hash(const char *name, size_t length);

/* A regular file extent that begins where its extent on the device does. */
struct file_extent {
	uint64_t offset;      /* in the file */
	uint64_t bytes;	      /* of the file; whole sectors */
	uint64_t disk_bytenr; /* logical address */
	uint64_t disk_bytes;  /* on the device */
	uint8_t compression;  /* COMPRESSION_* */
};

int file_extent_add(struct tree_builder *tree, uint64_t inode_number,
		    const struct file_extent *extent);

/*
 * Adds all content of a small file, or the target of a symbolic link. `bytes` are stored, which
 * unpack to `ram_bytes`.
 */
int file_inline_add(struct tree_builder *tree, uint64_t inode_number, const void *data,
		    size_t bytes, size_t ram_bytes, uint8_t compression);
