/* SPDX-License-Identifier: MIT */
/*
 * What is in use: every tree block and every data extent, with who refers to it. From this the
 * extent tree, the block groups' usage and the free-space tree are made.
 */
#ifndef BTRFS_EXTENTS_H
#define BTRFS_EXTENTS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* One reference to an extent. A shared data extent is entered once for each reference. */
struct extent {
	uint64_t start;	   /* logical address */
	uint64_t length;   /* bytes */
	uint64_t root;	   /* object id of the tree that refers to it */
	uint64_t objectid; /* data: inode number */
	uint64_t offset;   /* data: file offset minus offset within the extent */
	uint32_t count;	   /* data: how many file extents refer to it so */
	uint8_t level;	   /* tree block */
	bool is_data;
};

struct extent_list {
	struct extent *extents;
	size_t count;
	size_t capacity;
	bool sorted;
};

void extent_list_deinit(struct extent_list *list);
/* Returns 0 or -ENOMEM. */
int extent_list_add(struct extent_list *list, const struct extent *extent);
void extent_list_clear(struct extent_list *list);
/* By address; references to one extent in the order in which an extent item holds them. */
void extent_list_sort(struct extent_list *list);

/* The hash that orders references to a data extent (hash_extent_data_ref in the kernel). */
uint64_t extent_data_ref_hash(const struct extent *extent);

/* Walks two sorted lists as one. Neither may change meanwhile. */
struct extent_walk {
	const struct extent_list *lists[2];
	size_t next[2];
};

/*
 * The references to the next extent, all of them, or NULL at the end. They stand next to each
 * other; `count` is how many.
 */
const struct extent *extent_walk_next(struct extent_walk *walk, size_t *count);

#endif
