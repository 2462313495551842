/* SPDX-License-Identifier: MIT */
#include "btrfs/tree.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/array.h"
#include "base/cleanup.h"

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
	l->candidate = NULL;
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

static int level_prepare(struct tree_builder *tree, unsigned level, const struct key *key,
			 size_t size);
static void level_put(struct tree_builder *tree, unsigned level, const struct disk_key *key,
		      const void *data, size_t size);

static struct key block_first_key(const struct tree_level *l, unsigned level)
{
	return key_from_disk(level ? &node_pointer(l, 0)->key : &leaf_item(l, 0)->key);
}

/* Gets the address of the open block of `level`, which is written unless it can be shared. */
static int level_store(struct tree_builder *tree, unsigned level, uint64_t *bytenr)
{
	const struct tree_level *l = &tree->levels[level];
	bool is_same = false;
	int ret = 0;

	if (l->candidate)
		ret = tree->sink->compare(tree->sink->context, l->candidate->bytenr, l->block,
					  &is_same);
	if (ret || !is_same)
		return ret ?: level_write(tree, level, bytenr);
	*bytenr = l->candidate->bytenr;
	tree->block_count++;
	return 0;
}

/* Stores the open block of `level`, and adds a pointer to it to the level above. */
static int level_close(struct tree_builder *tree, unsigned level)
{
	struct key first = block_first_key(&tree->levels[level], level);
	struct disk_key_ptr pointer = {
		.key = key_to_disk(&first),
		.generation = htole64(tree->format->generation),
	};
	uint64_t bytenr;
	int ret = 0;

	if (level + 1 == tree->level_count)
		ret = level_open(tree);
	if (!ret)
		ret = level_prepare(tree, level + 1, &first, 0);
	if (!ret)
		ret = level_store(tree, level, &bytenr);
	if (!ret && tree->shape) {
		struct tree_blocks *blocks = &tree->shape->levels[level];

		ret = array_reserve(blocks->places, blocks->capacity, blocks->count + 1);
		if (!ret)
			blocks->places[blocks->count++] = (struct tree_place){ first, bytenr };
	}
	if (ret)
		return ret;
	level_reset(tree, level);
	pointer.bytenr = htole64(bytenr);
	level_put(tree, level + 1, &pointer.key, &pointer.bytenr,
		  sizeof(pointer) - sizeof(pointer.key));
	return 0;
}

static void level_put(struct tree_builder *tree, unsigned level, const struct disk_key *key,
		      const void *data, size_t size)
{
	struct tree_level *l = &tree->levels[level];

	if (level) {
		struct disk_key_ptr *pointer = node_pointer(l, l->count++);

		pointer->key = *key;
		memcpy(&pointer->bytenr, data, size);
		return;
	}
	l->data_end -= (uint32_t)size;
	if (size)
		memcpy(l->block + sizeof(struct disk_header) + l->data_end, data, size);
	*leaf_item(l, l->count++) = (struct disk_item){
		.key = *key,
		.offset = htole32(l->data_end),
		.size = htole32((uint32_t)size),
	};
}

static void level_copy(struct tree_builder *tree, unsigned level, const struct tree_level *from,
		       uint32_t slot)
{
	const struct disk_key_ptr *pointer = node_pointer(from, slot);
	const struct disk_item *item = leaf_item(from, slot);

	if (level)
		level_put(tree, level, &pointer->key, &pointer->bytenr,
			  sizeof(*pointer) - sizeof(pointer->key));
	else
		level_put(tree, level, &item->key,
			  from->block + sizeof(struct disk_header) + le32toh(item->offset),
			  le32toh(item->size));
}

static bool leaf_is_half_free(const struct tree_builder *tree, const struct tree_level *leaf)
{
	return leaf->data_end - leaf->count * sizeof(struct disk_item) >
	       tree->format->node_bytes / 2;
}

/* Closes the lower half of the open block of `level`: what is added next may go between others. */
static int level_split(struct tree_builder *tree, unsigned level)
{
	struct tree_level *l = &tree->levels[level], whole = *l;
	_cleanup_free_ uint8_t *copy = malloc(tree->format->node_bytes);
	uint32_t slot = 0;
	int ret;

	if (!copy)
		return -ENOMEM;
	memcpy(copy, l->block, tree->format->node_bytes);
	whole.block = copy;
	level_reset(tree, level);
	do
		level_copy(tree, level, &whole, slot++);
	while (slot + 1 < whole.count &&
	       (level ? slot < whole.count / 2 : leaf_is_half_free(tree, l)));
	ret = level_close(tree, level);
	while (!ret && slot < whole.count)
		level_copy(tree, level, &whole, slot++);
	return ret;
}

static bool level_has_room(const struct tree_builder *tree, unsigned level, size_t size)
{
	const struct tree_level *l = &tree->levels[level];

	return level ? l->count < node_capacity(tree) :
		       (l->count + 1) * sizeof(struct disk_item) + size <= l->data_end;
}

/* Makes room for what comes next at `level`. */
static int level_prepare(struct tree_builder *tree, unsigned level, const struct key *key,
			 size_t size)
{
	static const struct tree_blocks none;
	const struct tree_blocks *earlier = tree->earlier ? &tree->earlier->levels[level] : &none;
	struct tree_level *l = &tree->levels[level];
	bool is_at_border = false;
	int ret = 0;

	for (; l->next < earlier->count && key_compare(key, &earlier->places[l->next].first) >= 0;
	     l->next++)
		is_at_border = true;
	if (is_at_border && l->count)
		ret = level_close(tree, level);
	while (!ret && !level_has_room(tree, level, size)) {
		/* NB: where nothing follows in the earlier tree, blocks become as full as can be. */
		bool is_between = l->next < earlier->count && l->count > 1;

		ret = is_between ? level_split(tree, level) : level_close(tree, level);
	}
	if (is_at_border)
		l->candidate = &earlier->places[l->next - 1];
	return ret;
}

int tree_add(struct tree_builder *tree, const struct key *key, const void *data, size_t size)
{
	struct disk_key disk = key_to_disk(key);
	int ret;

	if (tree->has_items && key_compare(key, &tree->last_key) <= 0)
		return -EINVAL;
	if (size > tree_item_max_bytes(tree->format))
		return -E2BIG;
	ret = level_prepare(tree, 0, key, size);
	if (ret)
		return ret;
	level_put(tree, 0, &disk, data, size);
	tree->last_key = *key;
	tree->has_items = true;
	return 0;
}

void tree_shape_deinit(struct tree_shape *shape)
{
	for (unsigned i = 0; i < TREE_LEVELS; i++)
		free(shape->levels[i].places);
	*shape = (struct tree_shape){ 0 };
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
