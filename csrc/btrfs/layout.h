/* SPDX-License-Identifier: MIT */
/* Finds the layout of a file system: whether it is a seed, and which strategy made it. */
#pragma once

#include "btrfs/reader.h"

enum layout_strategy {
	STRATEGY_OTHER,
	STRATEGY_MEGA_EXTENT, /* seed.h */
	STRATEGY_FALLOCATE,   /* mkfs.btrfs, posix_fallocate and then tools/seed.c */
};

/* The file of virtual data: the largest one without checksums. */
struct virtual_file {
	uint64_t inode_number;
	struct disk_inode inode;
	uint64_t parent;	       /* inode number of a directory with it... */
	char name[NAME_MAX_BYTES + 1]; /* ...and its name there */
	uint64_t name_index;
	uint64_t extent_count;
	uint64_t prealloc_count; /* extents still preallocated, so read as zeroes */
	uint64_t data_bytes;	 /* in extents */
	uint64_t logical;	 /* address of the first extent */
};

struct layout {
	enum layout_strategy strategy;
	bool is_seeding;
	bool has_file;
	struct virtual_file file;   /* only for the two strategies above */
	uint64_t default_subvolume; /* object id: what a plain mount shows */
	uint64_t top_flags;	    /* INODE_* of its top directory: what new files inherit */
	uint64_t other_bytes;	    /* data of all other files of the top-level subvolume */
	uint64_t subvolume_count;   /* the top-level one included */
};

const char *layout_strategy_name(enum layout_strategy strategy);

/* Fills all that the superblock, root and file trees tell. Returns 0 or an error of reader.h. */
int layout_find(struct reader *reader, struct layout *layout);

/* Names the type and the profile of a chunk: "DATA", "SYSTEM", "SINGLE", "DUP"... */
const char *chunk_type_name(uint64_t type);
const char *chunk_profile_name(uint64_t type);
