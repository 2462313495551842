/* SPDX-License-Identifier: MIT */
/* What a file system is laid out like, as seen from outside: is it a seed, of which strategy? */
#ifndef BTRFS_LAYOUT_H
#define BTRFS_LAYOUT_H

#include "btrfs/reader.h"

enum layout_strategy {
	STRATEGY_OTHER,
	STRATEGY_MEGA_EXTENT, /* seed.h */
	STRATEGY_FALLOCATE,   /* made by mkfs.btrfs and posix_fallocate, its extents flipped */
};

/* The file whose data are virtual: the largest one without checksums. */
struct virtual_file {
	uint64_t inode_number;
	struct disk_inode inode;
	uint64_t parent;	       /* inode number of a directory that has it... */
	char name[NAME_MAX_BYTES + 1]; /* ...and its name there */
	uint64_t name_index;
	uint64_t extent_count;
	uint64_t prealloc_count; /* of them, still preallocated: these read as zeroes */
	uint64_t data_bytes;	 /* in extents */
	uint64_t logical;	 /* address of the first one */
};

struct layout {
	enum layout_strategy strategy;
	bool is_seeding;
	bool has_file;
	struct virtual_file file; /* of the two strategies above */
	uint64_t top_flags;	  /* INODE_* of the top directory: what new files inherit */
	uint64_t other_bytes;	  /* data of all other files of the top-level subvolume */
	uint64_t subvolume_count; /* the top-level one included */

	/* By layout_count_extents. */
	uint64_t data_extent_count;
	uint64_t data_extent_bytes;
	uint64_t tree_block_count;
};

const char *layout_strategy_name(enum layout_strategy strategy);

/* From the chunks and the file tree; 0 or a negative errno as the reader's functions. */
int layout_find(struct reader *reader, struct layout *layout);

/* From the extent tree. */
int layout_count_extents(struct reader *reader, struct layout *layout);

/* The type and the profile of a chunk: "DATA", "SYSTEM", "SINGLE", "DUP"... */
const char *chunk_type_name(uint64_t type);
const char *chunk_profile_name(uint64_t type);

#endif
