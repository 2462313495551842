/* SPDX-License-Identifier: MIT */
#include "btrfs/tree.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* A leaf has a header, items growing upwards, free space, and item data growing downwards. */
static struct disk_item *leaf_item(const struct tree_level *leaf, uint32_t slot)
{
	return (struct disk_item *)(leaf->block + sizeof(struct disk_header)) + slot;
}

/* A node has a header and pointers. */
static struct disk_key_ptr *node_pointer(const struct tree_level *node, uint32_t slot)
{
	return (struct disk_key_ptr *)(node->block + sizeof(struct disk_header)) + slot;
}

static uint32_t node_capacity(const struct tree_builder *tree)
{
	return (tree->format->node_bytes - sizeof(struct disk_header)) /
	       sizeof(struct disk_key_ptr);
}

static void level_reset(struct tree_builder *tree, unsigned level)
{
	struct tree_level *l = &tree->levels[level];

	memset(l->block, 0, tree->format->node_bytes);
	l->count = 0;
	l->data_end = tree->format->node_bytes - sizeof(struct disk_header);
}

static int level_open(struct tree_builder *tree)
{
	uint8_t *block;

	if (tree->level_count == TREE_LEVELS)
		return -EFBIG;
	block = malloc(tree->format->node_bytes);
	if (!block)
		return -ENOMEM;
	tree->levels[tree->level_count].block = block;
	level_reset(tree, tree->level_count++);
	return 0;
}

int tree_builder_init(struct tree_builder *tree, const struct tree_format *format,
		      const struct tree_sink *sink, uint64_t owner)
{
	*tree = (struct tree_builder){ .format = format, .sink = sink, .owner = owner };
	return level_open(tree);
}

void tree_builder_deinit(struct tree_builder *tree)
{
	for (unsigned i = 0; i < tree->level_count; i++)
		free(tree->levels[i].block);
	tree->level_count = 0;
}

static void fill_header(struct tree_builder *tree, unsigned level, uint64_t bytenr)
{
	struct disk_header *header = (struct disk_header *)tree->levels[level].block;
	const struct tree_format *format = tree->format;

	memcpy(header->fsid, format->fsid, UUID_BYTES);
	header->bytenr = htole64(bytenr);
	header->flags = htole64(BLOCK_WRITTEN | BLOCK_MIXED_BACKREF);
	memcpy(header->chunk_tree_uuid, format->chunk_tree_uuid, UUID_BYTES);
	header->generation = htole64(format->generation);
	header->owner = htole64(tree->owner);
	header->item_count = htole32(tree->levels[level].count);
	header->level = (uint8_t)level;
	csum_block_set(format->csum, header, format->node_bytes);
}

/* Gets an address for the open block of `level` from the sink, and hands it the block. */
static int level_write(struct tree_builder *tree, unsigned level, uint64_t *bytenr)
{
	int ret = tree->sink->place(tree->sink->context, level, bytenr);

	if (ret)
		return ret;
	tree->block_count++;
	if (!tree->sink->write)
		return 0;
	fill_header(tree, level, *bytenr);
	return tree->sink->write(tree->sink->context, *bytenr, tree->levels[level].block);
}

/* Writes the open block of `level`, and adds a pointer to it to the level above. */
static int level_close(struct tree_builder *tree, unsigned level)
{
	struct tree_level *parent = &tree->levels[level + 1];
	struct disk_key_ptr *pointer;
	struct disk_key first;
	uint64_t bytenr;
	int ret;

	if (level + 1 == tree->level_count)
		ret = level_open(tree);
	else if (parent->count == node_capacity(tree))
		ret = level_close(tree, level + 1);
	else
		ret = 0;
	if (ret)
		return ret;

	first = level ? node_pointer(&tree->levels[level], 0)->key :
			leaf_item(&tree->levels[level], 0)->key;
	ret = level_write(tree, level, &bytenr);
	if (ret)
		return ret;
	level_reset(tree, level);

	pointer = node_pointer(parent, parent->count++);
	pointer->key = first;
	pointer->bytenr = htole64(bytenr);
	pointer->generation = htole64(tree->format->generation);
	return 0;
}

int tree_add(struct tree_builder *tree, const struct key *key, const void *data, size_t size)
{
	struct tree_level *leaf = &tree->levels[0];
	struct disk_item *item;
	int ret;

	if (tree->has_items && key_compare(key, &tree->last_key) <= 0)
		return -EINVAL;
	if (size > tree_item_max_bytes(tree->format))
		return -E2BIG;
	if ((leaf->count + 1) * sizeof(struct disk_item) + size > leaf->data_end) {
		ret = level_close(tree, 0);
		if (ret)
			return ret;
	}
	leaf->data_end -= (uint32_t)size;
	if (size)
		memcpy(leaf->block + sizeof(struct disk_header) + leaf->data_end, data, size);
	item = leaf_item(leaf, leaf->count++);
	item->key = key_to_disk(key);
	item->offset = htole32(leaf->data_end);
	item->size = htole32((uint32_t)size);
	tree->last_key = *key;
	tree->has_items = true;
	return 0;
}

int tree_finish(struct tree_builder *tree, struct tree_root *root)
{
	unsigned top = 0;
	int ret;

	/* Closing a level may open one above it, so the level count may grow. */
	while (top + 1 < tree->level_count) {
		ret = level_close(tree, top++);
		if (ret)
			return ret;
	}
	ret = level_write(tree, top, &root->bytenr);
	if (ret)
		return ret;
	root->level = (uint8_t)top;
	root->block_count = tree->block_count;
	return 0;
}
