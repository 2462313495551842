/* SPDX-License-Identifier: MIT */
#include "btrfs/cursor.h"

#include <errno.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/cleanup.h"

void cursor_init(struct cursor *cursor, struct reader *reader, const struct block_expect *root)
{
	*cursor = (struct cursor){ .reader = reader, .root = *root };
}

void cursor_close(struct cursor *cursor)
{
	for (unsigned i = 0; i < TREE_LEVELS; i++)
		free(cursor->levels[i].block);
	memset(cursor->levels, 0, sizeof(cursor->levels));
}

static bool same_block(const struct block_expect *a, const struct block_expect *b)
{
	return a->bytenr == b->bytenr && a->generation == b->generation &&
	       a->has_first_key == b->has_first_key && a->has_end_key == b->has_end_key &&
	       (!a->has_first_key || key_compare(&a->first_key, &b->first_key) == 0) &&
	       (!a->has_end_key || key_compare(&a->end_key, &b->end_key) == 0);
}

static int load(struct cursor *cursor, const struct block_expect *expect)
{
	struct cursor_level *level = &cursor->levels[expect->level];
	int ret;

	if (level->block && level->expect.bytenr && same_block(&level->expect, expect))
		return 0;
	if (!level->block)
		level->block = malloc(cursor->reader->node_bytes);
	if (!level->block) {
		reader_fail(cursor->reader, -ENOMEM, "no memory for a tree block");
		return -ENOMEM;
	}
	level->expect.bytenr = 0; /* reading overwrites the block even if it fails */
	ret = reader_read_block(cursor->reader, expect, level->block);
	if (!ret)
		level->expect = *expect;
	return ret;
}

/* Counts the keys that are smaller than `key` or, with `or_equal`, not greater. */
static uint32_t count_below(const void *block, const struct key *key, bool or_equal)
{
	uint32_t low = 0, high = block_count(block);

	while (low < high) {
		uint32_t middle = (low + high) / 2;
		struct key found = block_key(block, middle);

		if (key_compare(&found, key) < or_equal)
			low = middle + 1;
		else
			high = middle;
	}
	return low;
}

/* Returns 0 if no block has been read yet, so that there is nothing to iterate. */
static uint32_t level_count(const struct cursor_level *level)
{
	return level->block ? block_count(level->block) : 0;
}

/* Takes the item in the leaf's slot or, behind the leaf's end, the next leaf's first item. */
static int settle(struct cursor *cursor)
{
	unsigned level = 0;

	while (cursor->levels[level].slot >= level_count(&cursor->levels[level])) {
		if (level == cursor->root.level)
			return 0;
		cursor->levels[++level].slot++;
	}
	while (level) {
		struct cursor_level *node = &cursor->levels[level];
		struct block_expect child = block_child(&node->expect, node->block, node->slot);
		int ret = load(cursor, &child);

		if (ret)
			return ret;
		cursor->levels[--level].slot = 0;
	}
	{
		uint8_t *leaf = cursor->levels[0].block;
		const struct disk_item *item = block_item(leaf, cursor->levels[0].slot);

		cursor->key = key_from_disk(&item->key);
		cursor->data = block_item_data(leaf, item);
		cursor->size = le32toh(item->size);
	}
	return 1;
}

int cursor_seek(struct cursor *cursor, const struct key *key)
{
	struct block_expect expect = cursor->root;

	for (;;) {
		struct cursor_level *level = &cursor->levels[expect.level];
		int ret = load(cursor, &expect);

		if (ret)
			return ret;
		if (!expect.level) {
			level->slot = count_below(level->block, key, false);
			return settle(cursor);
		}
		/* The last child that begins at or before the key; the first if none does. */
		level->slot = count_below(level->block, key, true);
		level->slot -= level->slot > 0;
		expect = block_child(&level->expect, level->block, level->slot);
	}
}

int cursor_first(struct cursor *cursor)
{
	struct key least = { 0 };

	return cursor_seek(cursor, &least);
}

int cursor_next(struct cursor *cursor)
{
	cursor->levels[0].slot++;
	return settle(cursor);
}

int cursor_find(struct cursor *cursor, const struct key *key)
{
	int ret = cursor_seek(cursor, key);
	char text[KEY_TEXT_BYTES], name[TREE_NAME_BYTES];

	if (ret < 0)
		return ret;
	if (ret == 0 || key_compare(&cursor->key, key) != 0)
		return reader_fail(cursor->reader, -ENOENT, "%s: there is no item %s",
				   tree_name(cursor->root.tree, name), key_text(key, text));
	return 0;
}

const char *cursor_name(const struct cursor *cursor, char text[static CURSOR_NAME_BYTES])
{
	char block[BLOCK_NAME_BYTES], key[KEY_TEXT_BYTES];

	snprintf(text, CURSOR_NAME_BYTES, "%s, item %" PRIu32 " %s",
		 block_name(&cursor->levels[0].expect, block), cursor->levels[0].slot,
		 key_text(&cursor->key, key));
	return text;
}

int cursor_fail(struct cursor *cursor, const char *format, ...)
{
	char text[READER_ERROR_BYTES - CURSOR_NAME_BYTES], where[CURSOR_NAME_BYTES];
	va_list args;

	va_start(args, format);
	vsnprintf(text, sizeof(text), format, args);
	va_end(args);
	return reader_fail(cursor->reader, -EUCLEAN, "%s: %s", cursor_name(cursor, where), text);
}

int cursor_copy(struct cursor *cursor, void *data, size_t size)
{
	if (cursor->size < size)
		return cursor_fail(cursor, "it has %" PRIu32 " bytes, %zu are needed", cursor->size,
				   size);
	memcpy(data, cursor->data, size);
	return 0;
}

void tree_root_of_super(const struct reader *reader, uint64_t objectid, struct block_expect *root)
{
	const struct disk_super *super = &reader->super;
	bool is_chunk = objectid == TREE_CHUNK;

	*root = (struct block_expect){
		.tree = objectid,
		.bytenr = le64toh(is_chunk ? super->chunk_root : super->root),
		.generation = le64toh(is_chunk ? super->chunk_root_generation : super->generation),
		.level = is_chunk ? super->chunk_root_level : super->root_level,
	};
}

int tree_root_of_item(struct cursor *cursor, struct disk_root *item, struct block_expect *root)
{
	/* Before Linux 3.6 the item ended with `level`. */
	const size_t old_bytes = offsetof(struct disk_root, generation_v2);
	size_t size = cursor->size < sizeof(*item) ? cursor->size : sizeof(*item);

	*item = (struct disk_root){ 0 };
	if (size < old_bytes)
		return cursor_fail(cursor, "a root item has more than %zu bytes", size);
	memcpy(item, cursor->data, size);
	if (item->level >= TREE_LEVELS)
		return cursor_fail(cursor, "level %u is higher than trees can be", item->level);
	*root = (struct block_expect){
		.tree = cursor->key.objectid,
		.bytenr = le64toh(item->bytenr),
		.generation = le64toh(item->generation),
		.level = item->level,
	};
	return 0;
}

int tree_root_find(struct reader *reader, uint64_t objectid, struct block_expect *root)
{
	_cleanup_(cursor_close) struct cursor cursor = { 0 };
	struct key key = { objectid, KEY_ROOT_ITEM, 0 };
	char name[TREE_NAME_BYTES];
	struct block_expect roots;
	struct disk_root item;
	int ret;

	if (objectid == TREE_ROOT || objectid == TREE_CHUNK) {
		tree_root_of_super(reader, objectid, root);
		return 0;
	}
	tree_root_of_super(reader, TREE_ROOT, &roots);
	cursor_init(&cursor, reader, &roots);
	/* In a snapshot's root item, the key's offset is the transaction that made it. */
	ret = cursor_seek(&cursor, &key);
	if (ret < 0)
		return ret;
	if (ret == 0 || cursor.key.objectid != objectid || cursor.key.type != KEY_ROOT_ITEM)
		return reader_fail(reader, -ENOENT, "root tree: there is no %s",
				   tree_name(objectid, name));
	return tree_root_of_item(&cursor, &item, root);
}
