/* SPDX-License-Identifier: MIT */
/* What is known of an image only when its trees of files have been built: sizes and identity. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/cleanup.h"
#include "base/fileio.h"
#include "base/size.h"
#include "btrfs/image.h"

int image_trim_chunk(struct image *image, uint64_t logical, uint64_t length)
{
	int ret = chunk_list_trim(&image->chunks, logical, length);

	if (!ret)
		block_alloc_trim(&image->metadata_alloc, logical, length);
	return ret;
}

/* Returns how many blocks the trees that image_commit makes need at most. */
static uint64_t late_blocks_max(const struct image *image)
{
	/* An item with its header, one reference, and one more item where that has no room. */
	const uint64_t item_bytes = 2 * sizeof(struct disk_item) + sizeof(struct disk_extent) +
				    sizeof(struct disk_data_ref);
	/* Subvolumes: root item, two references with names, entry of the UUID tree. */
	const uint64_t root_bytes = 1536;
	/* Chunks have an item in each of four trees, and one free extent beside each extent. */
	const uint64_t chunk_bytes = 512, few = 32;
	uint64_t bytes = image->extents.count * (item_bytes + sizeof(struct disk_item)) +
			 image->root_count * root_bytes + image->chunks.count * chunk_bytes;
	uint64_t usable = image->params.node_bytes - sizeof(struct disk_header) - 1024;
	uint64_t blocks = bytes / usable + few;

	/* Inner nodes, and the items for these blocks themselves. */
	return blocks + blocks / 16;
}

int image_trim_metadata(struct image *image)
{
	const struct chunk *metadata = NULL;
	uint64_t used;

	for (size_t i = 0; i < image->chunks.count; i++) {
		if (image->chunks.chunks[i].type & CHUNK_METADATA) {
			if (metadata)
				return -EINVAL;
			metadata = &image->chunks.chunks[i];
		}
	}
	if (!metadata)
		return -EINVAL;
	used = image->metadata_alloc.offset + late_blocks_max(image) * image->params.node_bytes;
	used = round_up_u64(used, MIB(1));
	return used < metadata->length ? image_trim_chunk(image, metadata->logical, used) : 0;
}

int image_trim_device(struct image *image, uint64_t device_bytes)
{
	for (size_t i = 0; i < image->chunks.count; i++) {
		const struct chunk *chunk = &image->chunks.chunks[i];

		for (unsigned s = 0; s < chunk->stripe_count; s++) {
			if (chunk->stripes[s] + chunk->length > device_bytes)
				return -EINVAL;
		}
	}
	image->params.device_bytes = device_bytes;
	return 0;
}

int image_visit_blocks(struct image *image, int (*visit)(void *context, const void *block),
		       void *context)
{
	_cleanup_free_ void *block = malloc(image->params.node_bytes);
	struct extent_walk walk = image_walk(image);
	const struct extent *extent;
	size_t count;
	int ret = 0;

	if (!block)
		return -ENOMEM;
	while (!ret && (extent = extent_walk_next(&walk, &count))) {
		if (extent->is_data)
			continue;
		ret = image_read_block(image, extent->start, block);
		if (!ret)
			ret = visit(context, block);
	}
	return ret;
}

static int rewrite_header(void *context, const void *old)
{
	struct image *image = context;
	_cleanup_free_ struct disk_header *block = malloc(image->params.node_bytes);

	if (!block)
		return -ENOMEM;
	memcpy(block, old, image->params.node_bytes);
	memcpy(block->fsid, image->format.fsid, UUID_BYTES);
	memcpy(block->chunk_tree_uuid, image->format.chunk_tree_uuid, UUID_BYTES);
	csum_block_set(image->format.csum, block, image->params.node_bytes);
	return image_write_block(image, le64toh(block->bytenr), block);
}

int image_set_identity(struct image *image, const uint8_t *fsid, const uint8_t *device_uuid,
		       const uint8_t *chunk_tree_uuid)
{
	memcpy(image->params.fsid, fsid, UUID_BYTES);
	memcpy(image->params.device_uuid, device_uuid, UUID_BYTES);
	memcpy(image->params.chunk_tree_uuid, chunk_tree_uuid, UUID_BYTES);
	memcpy(image->format.fsid, fsid, UUID_BYTES);
	memcpy(image->format.chunk_tree_uuid, chunk_tree_uuid, UUID_BYTES);
	return image_visit_blocks(image, rewrite_header, image);
}

int image_set_name(struct image *image, uint64_t objectid, const char *name)
{
	struct image_root *root = image_root_find(image, objectid);

	if (!root)
		return -ENOENT;
	root->place.name = name;
	return 0;
}

int image_set_uuid(struct image *image, uint64_t objectid, const uint8_t *uuid)
{
	struct image_root *root = image_root_find(image, objectid);

	if (!root)
		return -ENOENT;
	memcpy(root->uuid, uuid, UUID_BYTES);
	root->has_uuid = true;
	return 0;
}
