/* SPDX-License-Identifier: MIT */
#include "btrfs/seed.h"

#include <errno.h>
#include <string.h>

#include "btrfs/image.h"
#include "btrfs/inode.h"
#include "btrfs/super.h"

enum {
	VIRTUAL_INODE = OBJECT_FIRST_FREE + 1,
	TOP_MODE = 040755,
	/*
	 * Who may read this file may read all that is ever served; who gets a clone of a part of
	 * it may read that part. So it is for root alone.
	 */
	VIRTUAL_MODE = 0100400,
};

#define SYSTEM_MIN_BYTES MIB(4)
#define METADATA_MIN_BYTES MIB(8)
#define STUB_BYTES MIB(1)
/* For measuring: more than any seed needs, and together less than SEED_VIRTUAL_START. */
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
		int ret;

		length = min_u64(seed->chunk_bytes, seed->virtual_bytes - offset);
		reference.length = length;
		ret = image_add_data(image, &reference);
		if (!ret)
			ret = file_extent_add(tree, VIRTUAL_INODE, offset, reference.start, length);
		if (ret)
			return ret;
	}
	return 0;
}

/*
 * The top directory is NODATACOW, which new files inherit together with NODATASUM: only then do
 * they accept clones of the virtual file, which has no checksums as nobody knows its data yet.
 * Where inheritance is not wanted, those files need `chattr +C`, or `mount -o nodatasum`.
 *
 * The virtual file is IMMUTABLE: it can be cloned from, but not removed, which would free all
 * that nobody has cloned yet.
 */
static int emit_files(struct image *image, struct tree_builder *tree, void *context)
{
	const struct seed *seed = context;
	const uint64_t top = OBJECT_FIRST_FREE;
	struct disk_inode directory = inode_make(SEED_GENERATION, seed->time, TOP_MODE);
	struct disk_inode file = inode_make(SEED_GENERATION, seed->time, VIRTUAL_MODE);
	struct key target = { VIRTUAL_INODE, KEY_INODE_ITEM, 0 };
	const char *name = seed->virtual_name;
	int ret;

	directory.size = htole64(2 * strlen(name));
	directory.byte_count = htole64(image->params.node_bytes);
	directory.flags = htole64(seed->inherit_nodatasum ? INODE_NODATACOW : 0);
	file.size = file.byte_count = htole64(seed->virtual_bytes);
	file.flags = htole64(INODE_NODATASUM | INODE_IMMUTABLE);

	ret = inode_add(tree, top, &directory);
	if (!ret)
		ret = inode_ref_add(tree, top, top, 0, "..");
	if (!ret)
		ret = dir_item_add(tree, top, name, &target, ENTRY_FILE);
	if (!ret)
		ret = dir_index_add(tree, top, DIR_INDEX_FIRST, name, &target, ENTRY_FILE);
	if (!ret)
		ret = inode_add(tree, VIRTUAL_INODE, &file);
	if (!ret)
		ret = inode_ref_add(tree, VIRTUAL_INODE, top, DIR_INDEX_FIRST, name);
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
	};
	struct image_tree files = {
		.objectid = TREE_FS,
		.top_inode = OBJECT_FIRST_FREE,
		.uuid = seed->subvolume_uuid,
		.emit = emit_files,
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
		ret = image_build_tree(image, &files);
	if (!ret)
		ret = image_commit(image);
	return ret;
}

/* Place a chunk, all copies, from `*at` on, which moves behind them. */
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
 * By default SINGLE: a sprout inherits it, and DUP within one local file only writes everything
 * twice. On a disk of its own, DUP survives a bad sector.
 */
static void place_local_chunks(struct seed *seed, uint64_t system_bytes, uint64_t metadata_bytes)
{
	uint64_t profile = seed->metadata_dup ? CHUNK_DUP : 0;
	uint64_t at = 0;

	seed->system = place_chunk(&at, system_bytes, CHUNK_SYSTEM | profile);
	seed->metadata = place_chunk(&at, metadata_bytes, CHUNK_METADATA | profile);
	seed->stub = place_chunk(&at, STUB_BYTES, CHUNK_DATA | CHUNK_RAID0);
}

/* One block more than needed (see alloc.h), in whole MiB. */
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

	/* Build it once without writing, to see how many tree blocks it takes. */
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
