/* SPDX-License-Identifier: MIT */
/*
 * Writes a whole file system, once and from nothing, into a file:
 *
 *	image_init, image_add_chunk..., then in any order image_add_data... and image_build_tree...
 *	for every tree that holds files or checksums, then image_commit, image_deinit.
 *
 * image_commit makes all the trees that describe the file system itself (chunk, device, root,
 * extent, block group, free space, UUID, data relocation), so callers know only about files.
 * One device; the file's offsets are the device's.
 */
#ifndef BTRFS_IMAGE_H
#define BTRFS_IMAGE_H

#include "btrfs/alloc.h"
#include "btrfs/chunk.h"
#include "btrfs/extents.h"
#include "btrfs/tree.h"

enum { IMAGE_ROOTS_MAX = 64 };

struct image_params {
	int fd; /* -1: build everything, write nothing; to learn how many blocks it takes */
	uint32_t node_bytes;
	uint64_t device_bytes; /* multiple of SECTOR_BYTES */
	uint64_t super_flags;  /* 0 or SUPER_SEEDING */
	uint64_t generation;
	int64_t time;	   /* of everything that carries a time; seconds since 1970 */
	const char *label; /* fewer than LABEL_BYTES bytes */
	uint8_t fsid[UUID_BYTES];
	uint8_t device_uuid[UUID_BYTES];
	uint8_t chunk_tree_uuid[UUID_BYTES];
	uint16_t csum_type; /* CSUM_TYPE_* */
};

struct image;

/* Puts the items of a tree into its builder, in the order of their keys; 0 or negative errno. */
typedef int image_emit(struct image *image, struct tree_builder *tree, void *context);

/* A tree for image_build_tree. */
struct image_tree {
	uint64_t objectid;   /* TREE_FS, TREE_CSUM or a subvolume's */
	uint64_t top_inode;  /* inode number of its top directory; 0: it holds no files */
	const uint8_t *uuid; /* subvolumes: UUID_BYTES; NULL: none */
	image_emit *emit;
	void *context;
};

/* A finished tree. */
struct image_root {
	uint64_t objectid;
	uint64_t top_inode;
	uint8_t uuid[UUID_BYTES];
	bool has_uuid;
	struct tree_root tree;
};

struct image {
	struct image_params params;
	struct tree_format format;
	struct chunk_list chunks;
	/* Where blocks of the chunk tree, and of all other trees, come from. */
	struct block_alloc system_alloc;
	struct block_alloc metadata_alloc;
	/* Everything in use, but for the blocks of the trees that describe just that... */
	struct extent_list extents;
	/* ...which stand here; see commit.c. */
	struct extent_list late_extents;
	struct image_root roots[IMAGE_ROOTS_MAX]; /* ordered by object id */
	size_t root_count;
	/* Set by image_commit. */
	uint64_t used_bytes;	  /* of logical addresses, data included */
	uint64_t system_blocks;	  /* tree blocks in SYSTEM chunks */
	uint64_t metadata_blocks; /* tree blocks in METADATA chunks */
};

/* Returns 0, or -EINVAL when a parameter cannot be. */
int image_init(struct image *image, const struct image_params *params);
void image_deinit(struct image *image);

/*
 * Chunks come in the order of their addresses. At least one of each SYSTEM and METADATA is
 * needed, and each has to have room for one tree block more than it gets (see alloc.h).
 */
int image_add_chunk(struct image *image, const struct chunk *chunk);

/* A reference to a data extent in a DATA chunk. The data itself is the caller's affair. */
int image_add_data(struct image *image, const struct extent *reference);

/* -ENOSPC: the METADATA chunks are full; -E2BIG: too many trees; else what `emit` returned. */
int image_build_tree(struct image *image, const struct image_tree *tree);

/*
 * Finish the file system and write its superblocks. -EINVAL: extents overlap, or one lies in no
 * chunk; -ENOSPC: the SYSTEM or METADATA chunks are full; -E2BIG: an extent has more references
 * than an extent item holds.
 */
int image_commit(struct image *image);

/* For the library's own files. */
struct image_root *image_root_find(struct image *image, uint64_t objectid);
int image_root_add(struct image *image, const struct image_tree *tree, struct image_root **root);
int image_write_block(void *context, uint64_t bytenr, const void *block); /* context: the image */
struct extent_walk image_walk(struct image *image);

#endif
