/* SPDX-License-Identifier: MIT */
#include "btrfs/seed.h"

#include <errno.h>
#include <string.h>

#include "btrfs/image.h"
#include "btrfs/inode.h"
#include "btrfs/super.h"

enum {
	VIRTUAL_INODE = OBJECT_FIRST_FREE + 1,
	VIRTUAL_INDEX = DIR_INDEX_FIRST,
	SUBVOLUME = OBJECT_FIRST_FREE,
	SUBVOLUME_INDEX = VIRTUAL_INDEX + 1,
	TOP_MODE = 040755,
	/*
	 * Reading this file means reading all data that is served, so only root may do that.
	 * Other users get clones of the parts that they may read.
	 */
	VIRTUAL_MODE = 0100400,
};

#define SYSTEM_MIN_BYTES MIB(4)
#define METADATA_MIN_BYTES MIB(8)
#define STUB_BYTES MIB(1)
/* Used when measuring: more than any seed needs, and in sum less than SEED_VIRTUAL_START. */
#define SYSTEM_AMPLE_BYTES GIB(16)
#define METADATA_AMPLE_BYTES GIB(64)

static uint64_t min_u64(uint64_t a, uint64_t b)
{
	return a < b ? a : b;
}

static uint64_t max_u64(uint64_t a, uint64_t b)
{
	return a > b ? a : b;
}

uint64_t seed_chunk_count(uint64_t virtual_bytes, uint64_t chunk_bytes)
{
	return virtual_bytes / chunk_bytes + (virtual_bytes % chunk_bytes != 0);
}

static int add_virtual_chunks(const struct seed *seed, struct image *image)
{
	uint64_t end = seed->device_bytes;

	for (uint64_t start = seed->virtual_start; start < end; start += seed->chunk_bytes) {
		struct chunk chunk = {
			.logical = start,
			.length = min_u64(seed->chunk_bytes, end - start),
			.type = CHUNK_DATA,
			.stripe_count = 1,
			.stripes = { start },
		};
		int ret = image_add_chunk(image, &chunk);

		if (ret)
			return ret;
	}
	return 0;
}

static int add_virtual_extents(const struct seed *seed, struct image *image,
			       struct tree_builder *tree)
{
	uint64_t offset, length;

	for (offset = 0; offset < seed->virtual_bytes; offset += length) {
		struct extent reference = {
			.start = seed->virtual_start + offset,
			.root = TREE_FS,
			.objectid = VIRTUAL_INODE,
			.offset = offset,
			.count = 1,
			.is_data = true,
		};
		struct file_extent extent = {
			.offset = offset,
			.disk_bytenr = reference.start,
		};
		int ret;

		length = min_u64(seed->chunk_bytes, seed->virtual_bytes - offset);
		reference.length = extent.bytes = extent.disk_bytes = length;
		ret = image_add_data(image, &reference);
		if (!ret)
			ret = file_extent_add(tree, VIRTUAL_INODE, &extent);
		if (ret)
			return ret;
	}
	return 0;
}

static int top_add(struct image *image, struct tree_builder *tree, const struct seed *seed,
		   uint64_t size, uint64_t flags)
{
	struct disk_inode directory = inode_make(SEED_GENERATION, seed->time, TOP_MODE);
	int ret;

	directory.size = htole64(size);
	directory.byte_count = htole64(image->params.node_bytes);
	directory.flags = htole64(flags);
	ret = inode_add(tree, OBJECT_FIRST_FREE, &directory);
	return ret ?: inode_top_add(tree, OBJECT_FIRST_FREE);
}

/*
 * Emits the empty top directory of the subvolume that is mounted. If it has NODATACOW, new files
 * inherit NODATACOW and NODATASUM. Only such files can get clones of the virtual file, which has no
 * checksums, as its data are not known yet. Otherwise the flags have to be set file by file.
 */
static int emit_subvolume(struct image *image, struct tree_builder *tree, void *context)
{
	const struct seed *seed = context;

	return top_add(image, tree, seed, 0, seed->inherit_nodatasum ? INODE_NODATACOW : 0);
}

static int add_entries(struct tree_builder *tree, const struct seed *seed)
{
	struct dir_entry entries[] = {
		{ .name = seed->virtual_name,
		  .length = strlen(seed->virtual_name),
		  .target = { VIRTUAL_INODE, KEY_INODE_ITEM, 0 },
		  .index = VIRTUAL_INDEX,
		  .type = ENTRY_FILE },
		{ .name = SEED_SUBVOLUME_NAME,
		  .length = strlen(SEED_SUBVOLUME_NAME),
		  .target = { SUBVOLUME, KEY_ROOT_ITEM, UINT64_MAX },
		  .index = SUBVOLUME_INDEX,
		  .type = ENTRY_DIR },
	};

	return dir_entries_add(tree, OBJECT_FIRST_FREE, entries,
			       sizeof(entries) / sizeof(entries[0]));
}

/*
 * Emits the top-level subvolume with the virtual file. As that is IMMUTABLE, it can be cloned from,
 * but not removed, which would free all data that have no clone yet.
 */
static int emit_top_level(struct image *image, struct tree_builder *tree, void *context)
{
	const struct seed *seed = context;
	struct disk_inode file = inode_make(SEED_GENERATION, seed->time, VIRTUAL_MODE);
	const char *name = seed->virtual_name;
	struct inode_name link = { OBJECT_FIRST_FREE, VIRTUAL_INDEX, name, strlen(name) };
	int ret;

	file.size = file.byte_count = htole64(seed->virtual_bytes);
	/* NODATACOW changes nothing here, but shows (lsattr: C) which flag clones need. */
	file.flags = htole64(INODE_NODATASUM | INODE_NODATACOW | INODE_IMMUTABLE);
	ret = top_add(image, tree, seed, 2 * (strlen(name) + strlen(SEED_SUBVOLUME_NAME)), 0);
	if (!ret)
		ret = add_entries(tree, seed);
	if (!ret)
		ret = inode_add(tree, VIRTUAL_INODE, &file);
	if (!ret)
		ret = inode_names_add(tree, VIRTUAL_INODE, &link, 1);
	if (!ret)
		ret = add_virtual_extents(seed, image, tree);
	return ret;
}

static int add_local_chunks(const struct seed *seed, struct image *image)
{
	int ret = image_add_chunk(image, &seed->system);

	if (!ret)
		ret = image_add_chunk(image, &seed->metadata);
	if (!ret && seed->has_stub)
		ret = image_add_chunk(image, &seed->stub);
	return ret;
}

static int build(const struct seed *seed, struct image *image, int fd)
{
	struct image_params params = {
		.fd = fd,
		.node_bytes = DEFAULT_NODE_BYTES,
		.device_bytes = seed->device_bytes,
		.super_flags = SUPER_SEEDING,
		.generation = SEED_GENERATION,
		.time = seed->time,
		.label = seed->label,
		.csum_type = CSUM_TYPE_CRC32C,
		.default_subvolume = SUBVOLUME,
	};
	struct image_tree top_level = {
		.objectid = TREE_FS,
		.top_inode = OBJECT_FIRST_FREE,
		.uuid = seed->top_uuid,
		.emit = emit_top_level,
		.context = (void *)seed,
	};
	struct image_tree subvolume = {
		.objectid = SUBVOLUME,
		.top_inode = OBJECT_FIRST_FREE,
		.uuid = seed->subvolume_uuid,
		.place = { .parent = TREE_FS,
			   .directory = OBJECT_FIRST_FREE,
			   .index = SUBVOLUME_INDEX,
			   .name = SEED_SUBVOLUME_NAME },
		.emit = emit_subvolume,
		.context = (void *)seed,
	};
	int ret;

	memcpy(params.fsid, seed->fsid, UUID_BYTES);
	memcpy(params.device_uuid, seed->device_uuid, UUID_BYTES);
	memcpy(params.chunk_tree_uuid, seed->chunk_tree_uuid, UUID_BYTES);
	ret = image_init(image, &params);
	if (!ret)
		ret = add_local_chunks(seed, image);
	if (!ret)
		ret = add_virtual_chunks(seed, image);
	if (!ret)
		ret = image_build_tree(image, &top_level);
	if (!ret)
		ret = image_build_tree(image, &subvolume);
	if (!ret)
		ret = image_commit(image);
	return ret;
}

/* Places all copies of a chunk from `*at` on, and moves `*at` behind them. */
static struct chunk place_chunk(uint64_t *at, uint64_t length, uint64_t type)
{
	struct chunk chunk = {
		.length = length,
		.type = type,
		.stripe_count = type & CHUNK_DUP ? 2 : 1,
	};

	for (unsigned i = 0; i < chunk.stripe_count; i++) {
		chunk.stripes[i] = chunk_place(*at, length);
		*at = chunk.stripes[i] + length;
	}
	chunk.logical = chunk.stripes[0];
	return chunk;
}

/*
 * Places SYSTEM and METADATA. The default is SINGLE: a sprout inherits it, and DUP in one local
 * file only writes everything twice. On a disk of its own, DUP survives a bad sector.
 */
static void place_local_chunks(struct seed *seed, uint64_t system_bytes, uint64_t metadata_bytes)
{
	uint64_t profile = seed->metadata_dup ? CHUNK_DUP : 0;
	uint64_t at = 0;

	seed->system = place_chunk(&at, system_bytes, CHUNK_SYSTEM | profile);
	seed->metadata = place_chunk(&at, metadata_bytes, CHUNK_METADATA | profile);
	seed->stub = place_chunk(&at, STUB_BYTES, CHUNK_DATA | CHUNK_RAID0);
}

/* Returns room for one block more than needed (see alloc.h), in whole MiB. */
static uint64_t chunk_bytes_for(uint64_t blocks, uint64_t at_least)
{
	return max_u64(at_least, round_up_u64((blocks + 1) * DEFAULT_NODE_BYTES, MIB(1)));
}

static int check_inputs(const struct seed *seed)
{
	const char *name = seed->virtual_name;

	if (strlen(name) > NAME_MAX_BYTES || strlen(seed->label) >= LABEL_BYTES)
		return -ENAMETOOLONG;
	if (!*name || strchr(name, '/') || !strcmp(name, ".") || !strcmp(name, "..") ||
	    strchr(seed->label, '\n'))
		return -EINVAL;
	if (!strcmp(name, SEED_SUBVOLUME_NAME))
		return -EEXIST;
	if (seed->virtual_bytes % BLOCK_BYTES || seed->chunk_bytes % SEED_CHUNK_STEP_BYTES)
		return -EINVAL;
	if (seed->virtual_bytes < SEED_VIRTUAL_MIN_BYTES ||
	    seed->virtual_bytes > SEED_VIRTUAL_MAX_BYTES || seed->chunk_bytes > CHUNK_LENGTH_MAX ||
	    seed_chunk_count(seed->virtual_bytes, seed->chunk_bytes) > SEED_CHUNKS_MAX)
		return -ERANGE;
	return 0;
}

int seed_plan(struct seed *seed)
{
	struct image image = { 0 };
	unsigned mirrors;
	int ret;

	if (!seed->chunk_bytes)
		seed->chunk_bytes = CHUNK_LENGTH_MAX;
	ret = check_inputs(seed);
	if (ret)
		return ret;
	seed->virtual_start = SEED_VIRTUAL_START;
	seed->virtual_inode = VIRTUAL_INODE;
	seed->chunk_count = seed_chunk_count(seed->virtual_bytes, seed->chunk_bytes);
	seed->has_stub = seed->chunk_count >= SEED_STUB_CHUNKS;
	seed->device_bytes =
		seed->virtual_start + round_up_u64(seed->virtual_bytes, SEED_CHUNK_STEP_BYTES);

	/* Build it once without writing, to count the tree blocks that it needs. */
	place_local_chunks(seed, SYSTEM_AMPLE_BYTES, METADATA_AMPLE_BYTES);
	ret = build(seed, &image, -1);
	if (!ret) {
		place_local_chunks(seed, chunk_bytes_for(image.system_blocks, SYSTEM_MIN_BYTES),
				   chunk_bytes_for(image.metadata_blocks, METADATA_MIN_BYTES));
		seed->metadata_bytes =
			(image.system_blocks + image.metadata_blocks) * DEFAULT_NODE_BYTES;
	}
	image_deinit(&image);
	if (ret)
		return ret;
	mirrors = super_mirror_count(seed->device_bytes);
	seed->local_bytes = max_u64(super_mirror_offset(mirrors - 1) + SUPER_RESERVED_BYTES,
				    seed->stub.logical + seed->stub.length);
	return 0;
}

int seed_write(const struct seed *seed, int fd)
{
	struct image image = { 0 };
	int ret = build(seed, &image, fd);

	image_deinit(&image);
	return ret;
}
