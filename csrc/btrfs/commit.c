/* SPDX-License-Identifier: MIT */
/*
 * Finishes an image.
 *
 * The extent tree lists every tree block, its own included; the free-space and block-group trees
 * depend on the extent tree's own blocks, and the root tree on the place of all of them. So the
 * blocks of these four, the *late trees*, are found as a fixpoint: measure how many blocks each
 * tree needs given those reserved so far, reserve as many, and measure again, until nothing
 * changes. Then each tree is written into exactly the blocks reserved for it.
 *
 * This ends because only the extent tree's size depends on the number of blocks (alloc.h says why
 * the free-space tree's does not), and the extent tree only grows, by ever smaller steps.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/array.h"
#include "btrfs/super.h"
#include "btrfs/trees.h"

enum { FIXPOINT_ROUNDS_MAX = 64 };

struct late_block {
	uint64_t bytenr;
	uint8_t level;
};

struct late_tree {
	uint64_t objectid;
	image_emit *emit;
	/* Blocks in the order in which the builder finishes them; the last one is the root. */
	struct late_block *blocks;
	size_t count;
	size_t capacity;
	size_t next;  /* how many this round has placed */
	bool changed; /* this round's blocks differ from the previous round's */
	struct image *image;
};

/* Notes the block's level when measuring. reserve_late() will give it an address. */
static int measure_place(void *context, unsigned level, uint64_t *bytenr)
{
	struct late_tree *late = context;

	if (array_reserve(late->blocks, late->capacity, late->next + 1))
		return -ENOMEM;
	if (late->next >= late->count || late->blocks[late->next].level != level)
		late->changed = true;
	late->blocks[late->next++].level = (uint8_t)level;
	*bytenr = 0;
	return 0;
}

/* Gives each block its reserved address when writing. */
static int reserved_place(void *context, unsigned level, uint64_t *bytenr)
{
	struct late_tree *late = context;

	if (late->next >= late->count || late->blocks[late->next].level != level)
		return -EUCLEAN;
	*bytenr = late->blocks[late->next++].bytenr;
	return 0;
}

static int reserved_write(void *context, uint64_t bytenr, const void *block)
{
	struct late_tree *late = context;

	return image_write_block(late->image, bytenr, block);
}

static int build_late(struct late_tree *late, bool measure)
{
	struct image *image = late->image;
	struct tree_sink sink = {
		.place = measure ? measure_place : reserved_place,
		.write = measure || image->params.fd < 0 ? NULL : reserved_write,
		.context = late,
	};
	struct tree_builder builder;
	struct tree_root root;
	int ret;

	late->next = 0;
	late->changed = false;
	ret = tree_builder_init(&builder, &image->format, &sink, late->objectid);
	if (!ret)
		ret = late->emit(image, &builder, NULL);
	if (!ret)
		ret = tree_finish(&builder, &root);
	tree_builder_deinit(&builder);
	if (ret)
		return ret;
	if (late->next != late->count) {
		if (!measure)
			return -EUCLEAN;
		late->changed = true;
		late->count = late->next;
	}
	return 0;
}

/* Gives every block of the tree an address, and lists it as in use. */
static int reserve_late(struct late_tree *late)
{
	struct image *image = late->image;
	struct image_root *root = image_root_find(image, late->objectid);

	for (size_t i = 0; i < late->count; i++) {
		struct late_block *block = &late->blocks[i];
		struct extent extent = {
			.length = image->params.node_bytes,
			.root = late->objectid,
			.level = block->level,
		};
		int ret = block_alloc_take(&image->metadata_alloc, &extent.start);

		if (!ret)
			ret = extent_list_add(&image->late_extents, &extent);
		if (ret)
			return ret;
		block->bytenr = extent.start;
		root->tree = (struct tree_root){ extent.start, i + 1, block->level };
	}
	return 0;
}

static int reserve_all(struct image *image, struct late_tree *late, size_t count,
		       struct block_alloc_mark mark)
{
	int ret = 0;

	block_alloc_rewind(&image->metadata_alloc, mark);
	extent_list_clear(&image->late_extents);
	for (size_t i = 0; i < count && !ret; i++)
		ret = reserve_late(&late[i]);
	return ret;
}

static int write_late_trees(struct image *image)
{
	struct late_tree late[] = {
		{ .objectid = TREE_ROOT, .emit = emit_root_tree },
		{ .objectid = TREE_BLOCK_GROUP, .emit = emit_block_group_tree },
		{ .objectid = TREE_FREE_SPACE, .emit = emit_free_space_tree },
		{ .objectid = TREE_EXTENT, .emit = emit_extent_tree },
	};
	const size_t count = sizeof(late) / sizeof(late[0]);
	struct block_alloc_mark mark = block_alloc_mark(&image->metadata_alloc);
	struct image_root *root;
	bool changed = true;
	int ret = 0;

	/* All four are in the root tree from the start, because its size has to include them. */
	for (size_t i = 0; i < count && !ret; i++) {
		struct image_tree tree = { .objectid = late[i].objectid };

		late[i].image = image;
		ret = image_root_add(image, &tree, &root);
	}
	for (int round = 0; changed && !ret; round++) {
		changed = false;
		ret = round < FIXPOINT_ROUNDS_MAX ? reserve_all(image, late, count, mark) : -ELOOP;
		for (size_t i = 0; i < count && !ret; i++) {
			ret = build_late(&late[i], true);
			changed |= late[i].changed;
		}
	}
	for (size_t i = 0; i < count && !ret; i++)
		ret = build_late(&late[i], false);
	for (size_t i = 0; i < count; i++)
		free(late[i].blocks);
	return ret;
}

static int write_plain_trees(struct image *image)
{
	static const struct image_tree trees[] = {
		{ .objectid = TREE_CHUNK, .emit = emit_chunk_tree },
		{ .objectid = TREE_DEV, .emit = emit_dev_tree },
		{ .objectid = TREE_UUID, .emit = emit_uuid_tree },
		{ .objectid = TREE_DATA_RELOC,
		  .top_inode = OBJECT_FIRST_FREE,
		  .emit = emit_data_reloc_tree },
		/* Kernels demand one even where no data has checksums. */
		{ .objectid = TREE_CSUM },
	};

	for (size_t i = 0; i < sizeof(trees) / sizeof(trees[0]); i++) {
		int ret;

		if (trees[i].objectid == TREE_CSUM && image_root_find(image, TREE_CSUM))
			continue;
		ret = image_build_tree(image, &trees[i]);
		if (ret)
			return ret;
	}
	return 0;
}

static int write_supers(struct image *image)
{
	const struct image_params *params = &image->params;
	const struct tree_root *root = &image_root_find(image, TREE_ROOT)->tree;
	const struct tree_root *chunk_root = &image_root_find(image, TREE_CHUNK)->tree;
	struct disk_super super = {
		.flags = htole64(SUPER_WRITTEN | params->super_flags),
		.magic = htole64(SUPER_MAGIC),
		.generation = htole64(params->generation),
		.root = htole64(root->bytenr),
		.chunk_root = htole64(chunk_root->bytenr),
		.total_bytes = htole64(params->device_bytes),
		.bytes_used = htole64(image->used_bytes),
		.root_dir_objectid = htole64(TREE_ROOT_DIR),
		.device_count = htole64(1),
		.sector_bytes = htole32(SECTOR_BYTES),
		.node_bytes = htole32(params->node_bytes),
		.leaf_bytes = htole32(params->node_bytes),
		.stripe_bytes = htole32(SECTOR_BYTES),
		.chunk_root_generation = htole64(params->generation),
		.compat_ro_flags =
			htole64(COMPAT_RO_FREE_SPACE_TREE | COMPAT_RO_FREE_SPACE_TREE_VALID |
				COMPAT_RO_BLOCK_GROUP_TREE),
		.incompat_flags = htole64(INCOMPAT_MIXED_BACKREF | INCOMPAT_BIG_METADATA |
					  INCOMPAT_EXTENDED_IREF | INCOMPAT_SKINNY_METADATA |
					  INCOMPAT_NO_HOLES),
		.csum_type = htole16(params->csum_type),
		.root_level = root->level,
		.chunk_root_level = chunk_root->level,
		.uuid_tree_generation = htole64(params->generation),
	};
	int array_bytes;

	if (params->has_zstd)
		super.incompat_flags |= htole64(INCOMPAT_COMPRESS_ZSTD);
	if (params->default_subvolume)
		super.incompat_flags |= htole64(INCOMPAT_DEFAULT_SUBVOL);
	array_bytes =
		chunk_encode_system(&image->chunks, params->device_uuid, super.sys_chunk_array);

	if (array_bytes < 0)
		return array_bytes;
	super.sys_chunk_array_bytes = htole32((uint32_t)array_bytes);
	memcpy(super.fsid, params->fsid, UUID_BYTES);
	strncpy(super.label, params->label, LABEL_BYTES - 1);
	image_fill_device(image, &super.device);
	return params->fd < 0 ? 0 : super_write(params->fd, &super, image->format.csum);
}

int image_commit(struct image *image)
{
	struct extent_walk walk;
	const struct extent *extent;
	size_t count;
	int ret;

	ret = write_plain_trees(image);
	if (!ret)
		ret = write_late_trees(image);
	if (!ret)
		ret = write_supers(image);
	if (ret)
		return ret;
	image->system_blocks = image_root_find(image, TREE_CHUNK)->tree.block_count;
	image->metadata_blocks = 0;
	walk = image_walk(image);
	while ((extent = extent_walk_next(&walk, &count)))
		image->metadata_blocks += !extent->is_data;
	image->metadata_blocks -= image->system_blocks;
	return 0;
}
