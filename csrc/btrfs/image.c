/* SPDX-License-Identifier: MIT */
#include "btrfs/image.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/cleanup.h"
#include "base/fileio.h"

static bool params_are_valid(const struct image_params *params)
{
	uint32_t node = params->node_bytes;

	if (node < SECTOR_BYTES || node > STRIPE_LEN || node & (node - 1))
		return false;
	if (!params->device_bytes || params->device_bytes % SECTOR_BYTES)
		return false;
	return params->generation && csum_kind_by_id(params->csum_type) &&
	       strlen(params->label) < LABEL_BYTES;
}

int image_init(struct image *image, const struct image_params *params)
{
	*image = (struct image){ .params = *params };
	if (!params_are_valid(params))
		return -EINVAL;
	image->format.node_bytes = params->node_bytes;
	image->format.generation = params->generation;
	image->format.csum = csum_kind_by_id(params->csum_type);
	memcpy(image->format.fsid, params->fsid, UUID_BYTES);
	memcpy(image->format.chunk_tree_uuid, params->chunk_tree_uuid, UUID_BYTES);
	block_alloc_init(&image->system_alloc, params->node_bytes);
	block_alloc_init(&image->metadata_alloc, params->node_bytes);
	return 0;
}

void image_deinit(struct image *image)
{
	chunk_list_deinit(&image->chunks);
	block_alloc_deinit(&image->system_alloc);
	block_alloc_deinit(&image->metadata_alloc);
	extent_list_deinit(&image->extents);
	extent_list_deinit(&image->late_extents);
	free(image->roots);
	image->roots = NULL;
}

int image_add_chunk(struct image *image, const struct chunk *chunk)
{
	int ret;

	for (unsigned i = 0; i < chunk->stripe_count && i < CHUNK_STRIPES_MAX; i++) {
		uint64_t offset = chunk->stripes[i];

		if (offset > image->params.device_bytes ||
		    chunk->length > image->params.device_bytes - offset)
			return -EINVAL;
	}
	ret = chunk_list_add(&image->chunks, chunk);
	if (ret)
		return ret;
	if (chunk->type & CHUNK_SYSTEM)
		return block_alloc_add_range(&image->system_alloc, chunk->logical, chunk->length);
	if (chunk->type & CHUNK_METADATA)
		return block_alloc_add_range(&image->metadata_alloc, chunk->logical, chunk->length);
	return 0;
}

int image_add_data(struct image *image, const struct extent *reference)
{
	const struct chunk *chunk = chunk_find(&image->chunks, reference->start, reference->length);

	if (!chunk || !(chunk->type & CHUNK_DATA) || !reference->is_data || !reference->count ||
	    !reference->length || (reference->start | reference->length) % SECTOR_BYTES)
		return -EINVAL;
	return extent_list_add(&image->extents, reference);
}

struct image_root *image_root_find(struct image *image, uint64_t objectid)
{
	for (size_t i = 0; i < image->root_count; i++) {
		if (image->roots[i].objectid == objectid)
			return &image->roots[i];
	}
	return NULL;
}

int image_root_add(struct image *image, const struct image_tree *tree, struct image_root **root)
{
	size_t slot = image->root_count;
	struct image_root *roots;

	if (image_root_find(image, tree->objectid))
		return -EEXIST;
	roots = reallocarray(image->roots, image->root_count + 1, sizeof(*roots));
	if (!roots)
		return -ENOMEM;
	image->roots = roots;
	for (; slot && image->roots[slot - 1].objectid > tree->objectid; slot--)
		image->roots[slot] = image->roots[slot - 1];
	image->root_count++;
	*root = &image->roots[slot];
	**root = (struct image_root){
		.objectid = tree->objectid,
		.top_inode = tree->top_inode,
		.read_only = tree->read_only,
		.may_share = tree->shape != NULL,
		.place = tree->place,
	};
	if (tree->uuid) {
		memcpy((*root)->uuid, tree->uuid, UUID_BYTES);
		(*root)->has_uuid = true;
	}
	return 0;
}

int image_write_block(void *context, uint64_t bytenr, const void *block)
{
	struct image *image = context;
	uint32_t node_bytes = image->params.node_bytes;
	const struct chunk *chunk = chunk_find(&image->chunks, bytenr, node_bytes);

	if (!chunk)
		return -EINVAL;
	for (unsigned i = 0; i < chunk->stripe_count; i++) {
		int ret = pwrite_full(image->params.fd, block, node_bytes,
				      chunk->stripes[i] + (bytenr - chunk->logical));

		if (ret)
			return ret;
	}
	return 0;
}

int image_read_block(struct image *image, uint64_t bytenr, void *block)
{
	uint32_t node_bytes = image->params.node_bytes;
	const struct chunk *chunk = chunk_find(&image->chunks, bytenr, node_bytes);

	if (!chunk)
		return -EINVAL;
	return pread_full(image->params.fd, block, node_bytes,
			  chunk->stripes[0] + (bytenr - chunk->logical));
}

/* The context of image_build_tree's sink. */
struct build {
	struct image *image;
	const struct image_tree *tree;
	uint64_t
		first; /* address of a block; 0: there is none yet. Those of other trees come before */
	void *block;
};

static int build_place(void *context, unsigned level, uint64_t *bytenr)
{
	struct build *build = context;
	struct image *image = build->image;
	struct extent extent = {
		.length = image->params.node_bytes,
		.root = build->tree->objectid,
		.level = (uint8_t)level,
	};
	int ret = block_alloc_take(build->tree->objectid == TREE_CHUNK ? &image->system_alloc :
									 &image->metadata_alloc,
				   &extent.start);

	if (ret)
		return ret;
	*bytenr = extent.start;
	if (!build->first)
		build->first = extent.start;
	return extent_list_add(&image->extents, &extent);
}

/* Adds references to blocks of other trees, which a node of this one points to. */
static int add_shared(struct build *build, const struct disk_header *node)
{
	const struct disk_key_ptr *pointers = (const struct disk_key_ptr *)(node + 1);
	struct image *image = build->image;
	int ret = 0;

	for (uint32_t i = 0; i < le32toh(node->item_count) && !ret; i++) {
		struct extent extent = {
			.start = le64toh(pointers[i].bytenr),
			.length = image->params.node_bytes,
			.root = build->tree->objectid,
			.level = node->level - 1,
		};

		if (extent.start >= build->first)
			continue;
		image->has_shared = true;
		ret = extent_list_add(&image->extents, &extent);
	}
	return ret;
}

static int build_write(void *context, uint64_t bytenr, const void *block)
{
	const struct disk_header *header = block;
	struct build *build = context;
	int ret = image_write_block(build->image, bytenr, block);

	if (!ret && header->level)
		ret = add_shared(build, header);
	if (!ret && build->tree->written)
		ret = build->tree->written(build->tree->context, block);
	return ret;
}

static int build_compare(void *context, uint64_t bytenr, const void *block, bool *is_same)
{
	const size_t skipped = sizeof(struct disk_header);
	struct build *build = context;
	int ret = image_read_block(build->image, bytenr, build->block);

	if (!ret)
		*is_same = !memcmp((const uint8_t *)block + skipped,
				   (const uint8_t *)build->block + skipped,
				   build->image->params.node_bytes - skipped);
	return ret;
}

int image_build_tree(struct image *image, const struct image_tree *tree)
{
	_cleanup_free_ void *block = malloc(image->params.node_bytes);
	struct build build = {
		.image = image,
		.tree = tree,
		.block = block,
	};
	struct tree_sink sink = {
		.place = build_place,
		.write = image->params.fd < 0 ? NULL : build_write,
		.compare = build_compare,
		.context = &build,
	};
	struct tree_shape shape = { 0 };
	struct tree_builder builder;
	struct image_root *root;
	struct tree_root built;
	int ret;

	if (!block)
		return -ENOMEM;
	ret = tree_builder_init(&builder, &image->format, &sink, tree->objectid);
	builder.earlier = tree->shape;
	builder.shape = tree->shape ? &shape : NULL;
	if (!ret && tree->emit)
		ret = tree->emit(image, &builder, tree->context);
	if (!ret)
		ret = tree_finish(&builder, &built);
	if (!ret)
		ret = image_root_add(image, tree, &root);
	tree_builder_deinit(&builder);
	if (ret || !tree->shape) {
		tree_shape_deinit(&shape);
	} else {
		tree_shape_deinit(tree->shape);
		*tree->shape = shape;
	}
	if (!ret)
		root->tree = built;
	return ret;
}

struct extent_walk image_walk(struct image *image)
{
	extent_list_sort(&image->extents);
	extent_list_sort(&image->late_extents);
	return (struct extent_walk){ .lists = { &image->extents, &image->late_extents } };
}
