/* SPDX-License-Identifier: MIT */
/*
 * Lists of all tree blocks and data extents in use, with the references to each. The extent tree,
 * the block groups' usage and the free-space tree are made from them.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* One reference to an extent. A shared one is entered once for each reference. */
struct extent {
	uint64_t start;	 /* logical address */
	uint64_t length; /* bytes */
	uint64_t root; /* object id of the tree that refers to it: a tree block's parent's owner */
	uint64_t objectid; /* data: inode number */
	uint64_t offset;   /* data: file offset minus offset within the extent */
	uint32_t count;	   /* data: how many file extents make this reference */
	uint8_t level;	   /* of a tree block */
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
/* Sorts by address, and references to one extent in the order that an extent item demands. */
void extent_list_sort(struct extent_list *list);

/* Computes the hash that orders references to a data extent (the kernel's hash_extent_data_ref). */
uint64_t extent_data_ref_hash(const struct extent *extent);

/* A walk over two sorted lists as if they were one. Neither may change meanwhile. */
struct extent_walk {
	const struct extent_list *lists[2];
	size_t next[2];
};

/* Returns an array of all `*count` references to the next extent, or NULL at the end. */
const struct extent *extent_walk_next(struct extent_walk *walk, size_t *count);
