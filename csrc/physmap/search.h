/* SPDX-License-Identifier: MIT */
/* Lists one object's items of one type in a btrfs tree, by key (BTRFS_IOC_TREE_SEARCH_V2). */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct tree_search {
	/* Inputs. */
	int fd;		   /* any open file of the file system */
	uint64_t tree;	   /* root id; 0 is the subvolume that `fd` is in */
	uint64_t objectid; /* only items of this object ... */
	uint32_t type;	   /* ... and of this type */
	/* State. */
	struct btrfs_ioctl_search_args_v2 *args;
	size_t position; /* of the next item in the buffer */
	uint32_t left;	 /* items left in the buffer */
	uint64_t next_offset;
	bool finished;
};

struct tree_item {
	uint64_t offset; /* of the item's key */
	const void *data;
	uint32_t length;
};

/* Returns 0 or a negative errno; after a failed init there is nothing to undo. */
int tree_search_init(struct tree_search *search, int fd, uint64_t tree, uint64_t objectid,
		     uint32_t type);
void tree_search_deinit(struct tree_search *search);

/*
 * Returns 1 with the next item (its data is valid until the next call), 0 at the end, or a
 * negative errno: -EPERM without CAP_SYS_ADMIN in the initial user namespace.
 */
int tree_search_next(struct tree_search *search, struct tree_item *item);
