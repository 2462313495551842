/* SPDX-License-Identifier: MIT */
/*
 * Writes a whole new file system into a file, in one go:
 *
 *	image_init, image_add_chunk..., then in any order image_add_data... and image_build_tree...
 *	for every tree that holds files or checksums, then image_commit, image_deinit.
 *
 * image_commit makes all the trees that describe the file system itself (chunk, device, root,
 * extent, block group, free space, UUID, data relocation), so callers only provide trees of
 * files. There is one device, and the file's offsets are the device's.
 */
#pragma once

#include "btrfs/alloc.h"
#include "btrfs/chunk.h"
#include "btrfs/extents.h"
#include "btrfs/tree.h"

struct image_params {
	int fd; /* -1: write nothing, only find out how many blocks are needed */
	uint32_t node_bytes;
	uint64_t device_bytes; /* multiple of SECTOR_BYTES */
	uint64_t super_flags;  /* 0 or SUPER_SEEDING */
	uint64_t generation;
	int64_t time;	   /* for all timestamps; seconds since 1970 */
	const char *label; /* fewer than LABEL_BYTES bytes */
	uint8_t fsid[UUID_BYTES];
	uint8_t device_uuid[UUID_BYTES];
	uint8_t chunk_tree_uuid[UUID_BYTES];
	uint16_t csum_type;	    /* CSUM_TYPE_* */
	bool has_zstd;		    /* there may be extents compressed with zstd */
	uint64_t default_subvolume; /* what a plain mount shows; 0: TREE_FS */
};

struct image;

/* Adds a tree's items to its builder, in the order of keys. Returns 0 or a negative errno. */
typedef int image_emit(struct image *image, struct tree_builder *tree, void *context);

/* Where a subvolume is within another one. NB: the caller has to add the directory's items. */
struct image_place {
	uint64_t parent;    /* object id of the tree; 0: no parent */
	uint64_t directory; /* inode number there */
	uint64_t index;
	const char *name; /* up to NAME_MAX_BYTES; has to outlive the image */
};

/* A tree for image_build_tree. */
struct image_tree {
	uint64_t objectid;   /* TREE_FS, TREE_CSUM or a subvolume's */
	uint64_t top_inode;  /* inode number of its top directory; 0: it holds no files */
	const uint8_t *uuid; /* subvolumes: UUID_BYTES; NULL: none */
	bool read_only;	     /* subvolumes */
	struct image_place place;
	image_emit *emit;
	/* Sees each block that is written, in the order of their addresses; may be NULL. */
	int (*written)(void *context, const void *block);
	/*
	 * Subvolumes: the blocks of one built before, empty at first, and of this one after. What
	 * is equal in both is shared. NULL: share nothing.
	 */
	struct tree_shape *shape;
	void *context;
};

/* A finished tree. */
struct image_root {
	uint64_t objectid;
	uint64_t top_inode;
	uint8_t uuid[UUID_BYTES];
	bool has_uuid;
	bool read_only;
	bool may_share; /* blocks with other trees */
	struct image_place place;
	struct tree_root tree;
};

struct image {
	struct image_params params;
	struct tree_format format;
	struct chunk_list chunks;
	/* Allocators of the chunk tree's blocks, and of all other trees' blocks. */
	struct block_alloc system_alloc;
	struct block_alloc metadata_alloc;
	/* All extents in use, except for the blocks of the late trees... */
	struct extent_list extents;
	/* ...which are listed here; see commit.c. */
	struct extent_list late_extents;
	struct image_root *roots; /* ordered by object id */
	size_t root_count;
	bool has_shared; /* tree blocks of several trees */
	/* Set by image_commit. */
	uint64_t used_bytes;	  /* of logical addresses, data included */
	uint64_t system_blocks;	  /* tree blocks in SYSTEM chunks */
	uint64_t metadata_blocks; /* tree blocks in METADATA chunks */
};

/* Returns 0, or -EINVAL when a parameter is not valid. */
int image_init(struct image *image, const struct image_params *params);
void image_deinit(struct image *image);

/*
 * Adds a chunk; they have to come in the order of their addresses. At least one SYSTEM and one
 * METADATA chunk are needed, and each needs room for one more tree block than it gets (alloc.h).
 */
int image_add_chunk(struct image *image, const struct chunk *chunk);

/* Adds a reference to a data extent in a DATA chunk. The caller writes the data itself. */
int image_add_data(struct image *image, const struct extent *reference);

/* Returns -ENOSPC if the METADATA chunks are full, -EEXIST for a second tree, or emit's error. */
int image_build_tree(struct image *image, const struct image_tree *tree);

/*
 * Shortens the chunk at `logical` to `length`, which has to hold all that is in it. So a chunk may
 * be added with ample room before it is known how much goes there.
 */
int image_trim_chunk(struct image *image, uint64_t logical, uint64_t length);

/* Shortens the only METADATA chunk to what is in it and what image_commit adds, in whole MiB. */
int image_trim_metadata(struct image *image);

/* Shortens the device; it still has to hold all chunks. */
int image_trim_device(struct image *image, uint64_t device_bytes);

/* Visits all tree blocks written so far, in the order of their addresses. `fd` may not be -1. */
int image_visit_blocks(struct image *image, int (*visit)(void *context, const void *block),
		       void *context);

/*
 * Replaces all UUIDs of the file system, in the tree blocks written so far as well. Thus they can
 * be derived from the content of these blocks. Each is of UUID_BYTES.
 */
int image_set_identity(struct image *image, const uint8_t *fsid, const uint8_t *device_uuid,
		       const uint8_t *chunk_tree_uuid);

/* Set the name or the UUID of a subvolume that has been built. */
int image_set_name(struct image *image, uint64_t objectid, const char *name);
int image_set_uuid(struct image *image, uint64_t objectid, const uint8_t *uuid);

/*
 * Finishes the file system and writes its superblocks. -EINVAL: extents overlap, or one lies in no
 * chunk; -ENOSPC: the SYSTEM or METADATA chunks are full.
 */
int image_commit(struct image *image);

/* For the library's own files. */
struct image_root *image_root_find(struct image *image, uint64_t objectid);
int image_root_add(struct image *image, const struct image_tree *tree, struct image_root **root);
int image_write_block(void *context, uint64_t bytenr, const void *block); /* context: the image */
struct extent_walk image_walk(struct image *image);
int image_read_block(struct image *image, uint64_t bytenr, void *block);
