/* SPDX-License-Identifier: MIT */
/* Emits the trees of used and of free space. All are made from the image's sorted extents. */
#include <errno.h>
#include <string.h>

#include "btrfs/trees.h"

/* The kernel's limit for inline references is 1/16 of a leaf (BTRFS_MAX_EXTENT_ITEM_SIZE). */
enum { EXTENT_ITEM_FRACTION = 16, EXTENT_ITEM_MAX_BYTES = STRIPE_LEN / EXTENT_ITEM_FRACTION };

static size_t append(uint8_t *item, size_t used, const void *data, size_t size)
{
	memcpy(item + used, data, size);
	return used + size;
}

static struct disk_data_ref data_ref_make(const struct extent *ref)
{
	return (struct disk_data_ref){
		.type = KEY_EXTENT_DATA_REF,
		.root = htole64(ref->root),
		.objectid = htole64(ref->objectid),
		.offset = htole64(ref->offset),
		.count = htole32(ref->count),
	};
}

/* Returns how many references of that size have room in an extent item. */
static size_t inline_refs_max(const struct tree_builder *tree, size_t ref_bytes)
{
	size_t leaf_bytes = tree->format->node_bytes - sizeof(struct disk_header);
	size_t item_bytes = leaf_bytes / EXTENT_ITEM_FRACTION - sizeof(struct disk_item);

	return (item_bytes - sizeof(struct disk_extent)) / ref_bytes;
}

/* `refs` are ordered by falling trees; those without room in the item have items with rising ones. */
static int emit_tree_block(struct tree_builder *tree, const struct extent *refs, size_t count)
{
	struct key key = { refs->start, KEY_METADATA_ITEM, refs->level };
	uint8_t item[EXTENT_ITEM_MAX_BYTES];
	struct disk_extent extent = {
		.refs = htole64(count),
		.generation = htole64(tree->format->generation),
		.flags = htole64(EXTENT_TREE_BLOCK_FLAG),
	};
	size_t inline_count = inline_refs_max(tree, sizeof(struct disk_tree_block_ref));
	size_t size = append(item, 0, &extent, sizeof(extent));
	int ret;

	for (size_t i = 1; i < count; i++) {
		if (refs[i].root == refs[i - 1].root)
			return -EINVAL; /* two blocks of a tree have the same address */
	}
	for (size_t i = 0; i < count && i < inline_count; i++) {
		struct disk_tree_block_ref ref = {
			.type = KEY_TREE_BLOCK_REF,
			.offset = htole64(refs[i].root),
		};

		size = append(item, size, &ref, sizeof(ref));
	}
	ret = tree_add(tree, &key, item, size);
	for (size_t i = count; i > inline_count && !ret; i--) {
		key = (struct key){ refs->start, KEY_TREE_BLOCK_REF, refs[i - 1].root };
		ret = tree_add(tree, &key, NULL, 0);
	}
	return ret;
}

/*
 * Adds items for references that have no room in the extent item. `refs` are ordered by falling
 * hash, the items have rising ones; of those with equal hashes, each has the next free one, as the
 * kernel's insert_extent_data_ref() and lookup_extent_data_ref() do it.
 */
static int emit_keyed_refs(struct tree_builder *tree, const struct extent *refs, size_t count)
{
	uint64_t free_hash = 0;

	for (size_t i = count; i > 0; i--) {
		const struct extent *ref = &refs[i - 1];
		struct disk_data_ref disk = data_ref_make(ref);
		uint64_t hash = extent_data_ref_hash(ref);
		struct key key = { ref->start, KEY_EXTENT_DATA_REF,
				   hash < free_hash ? free_hash : hash };
		int ret;

		/* The type is in the key here. */
		ret = tree_add(tree, &key, &disk.root, sizeof(disk) - sizeof(disk.type));
		if (ret)
			return ret;
		free_hash = key.offset + 1;
	}
	return 0;
}

static int emit_data_extent(struct tree_builder *tree, const struct extent *refs, size_t count)
{
	struct key key = { refs->start, KEY_EXTENT_ITEM, refs->length };
	uint8_t item[EXTENT_ITEM_MAX_BYTES];
	struct disk_extent extent = {
		.generation = htole64(tree->format->generation),
		.flags = htole64(EXTENT_DATA_FLAG),
	};
	size_t size = sizeof(extent),
	       inline_count = inline_refs_max(tree, sizeof(struct disk_data_ref));
	uint64_t total = 0;
	int ret;

	if (count < inline_count)
		inline_count = count;
	for (size_t i = 0; i < count; i++) {
		if (refs[i].length != refs->length)
			return -EINVAL;
		total += refs[i].count;
	}
	for (size_t i = 0; i < inline_count; i++) {
		struct disk_data_ref ref = data_ref_make(&refs[i]);

		size = append(item, size, &ref, sizeof(ref));
	}
	extent.refs = htole64(total);
	append(item, 0, &extent, sizeof(extent));
	ret = tree_add(tree, &key, item, size);
	return ret ?: emit_keyed_refs(tree, refs + inline_count, count - inline_count);
}

int emit_extent_tree(struct image *image, struct tree_builder *tree, void *context)
{
	struct extent_walk walk = image_walk(image);
	const struct extent *refs;
	size_t count;
	int ret = 0;

	while (!ret && (refs = extent_walk_next(&walk, &count))) {
		ret = refs->is_data ? emit_data_extent(tree, refs, count) :
				      emit_tree_block(tree, refs, count);
	}
	return ret;
}

/* Adds up the used bytes of `chunk`. `walk` has to be at the chunk's first extent. */
static uint64_t chunk_used_bytes(struct extent_walk *walk, const struct chunk *chunk)
{
	struct extent_walk ahead = *walk;
	const struct extent *extent;
	uint64_t used = 0;
	size_t count;

	while ((extent = extent_walk_next(&ahead, &count)) &&
	       extent->start - chunk->logical < chunk->length) {
		used += extent->length;
		*walk = ahead;
	}
	return used;
}

int emit_block_group_tree(struct image *image, struct tree_builder *tree, void *context)
{
	struct extent_walk walk = image_walk(image);

	image->used_bytes = 0;
	for (size_t i = 0; i < image->chunks.count; i++) {
		const struct chunk *chunk = &image->chunks.chunks[i];
		struct key key = { chunk->logical, KEY_BLOCK_GROUP_ITEM, chunk->length };
		uint64_t used = chunk_used_bytes(&walk, chunk);
		struct disk_block_group item = {
			.used = htole64(used),
			.chunk_objectid = htole64(OBJECT_FIRST_CHUNK),
			.flags = htole64(chunk->type),
		};
		int ret = tree_add(tree, &key, &item, sizeof(item));

		if (ret)
			return ret;
		image->used_bytes += used;
	}
	return 0;
}

/*
 * Adds the free extents of `chunk` to `tree`, or only counts them if `tree` is NULL. Moves `walk`
 * from the chunk's first extent to the next chunk's. Returns -EINVAL if extents overlap, or one is
 * in no chunk.
 */
static int visit_free(struct extent_walk *walk, const struct chunk *chunk,
		      struct tree_builder *tree, uint32_t *free_count)
{
	uint64_t position = chunk->logical, end = chunk->logical + chunk->length;
	struct extent_walk ahead = *walk;
	const struct extent *extent;
	size_t count;
	int ret = 0;

	*free_count = 0;
	while (!ret && position < end) {
		struct key key = { position, KEY_FREE_SPACE_EXTENT, 0 };
		uint64_t used_from = end, used_to = end;

		extent = extent_walk_next(&ahead, &count);
		if (extent && extent->start < end) {
			used_from = extent->start;
			used_to = used_from + extent->length;
			*walk = ahead;
		}
		if (used_from < position || used_to > end)
			return -EINVAL;
		key.offset = used_from - position;
		if (key.offset) {
			++*free_count;
			ret = tree ? tree_add(tree, &key, NULL, 0) : 0;
		}
		position = used_to;
	}
	return ret;
}

int emit_free_space_tree(struct image *image, struct tree_builder *tree, void *context)
{
	struct extent_walk walk = image_walk(image);
	size_t count;

	for (size_t i = 0; i < image->chunks.count; i++) {
		const struct chunk *chunk = &image->chunks.chunks[i];
		struct key key = { chunk->logical, KEY_FREE_SPACE_INFO, chunk->length };
		struct extent_walk start = walk;
		struct disk_free_space_info info = { 0 };
		uint32_t free_count;
		int ret;

		/* The item with the count precedes the free extents in the tree. */
		ret = visit_free(&start, chunk, NULL, &free_count);
		info.extent_count = htole32(free_count);
		if (!ret)
			ret = tree_add(tree, &key, &info, sizeof(info));
		if (!ret)
			ret = visit_free(&walk, chunk, tree, &free_count);
		if (ret)
			return ret;
	}
	return extent_walk_next(&walk, &count) ? -EINVAL : 0;
}
