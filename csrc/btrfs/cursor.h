/* SPDX-License-Identifier: MIT */
/*
 * Iterates the items of a tree in the order of their keys:
 *
 *	_cleanup_(cursor_close) struct cursor cursor;
 *
 *	cursor_init(&cursor, reader, &root);
 *	for (ret = cursor_first(&cursor); ret > 0; ret = cursor_next(&cursor))
 *		... cursor.key, cursor.data, cursor.size
 *	if (ret < 0)
 *		... reader->error says what is wrong, and where
 *
 * NB: item data is not aligned, and of any length: copy it with cursor_copy().
 */
#pragma once

#include "btrfs/block.h"
#include "btrfs/reader.h"

struct cursor_level {
	struct block_expect expect;
	uint8_t *block; /* NULL: none read yet */
	uint32_t slot;
};

struct cursor {
	struct reader *reader;
	struct block_expect root;
	struct cursor_level levels[TREE_LEVELS]; /* 0: the leaf, whose `block` holds the item */
	/* The item, valid until the cursor moves. */
	struct key key;
	const uint8_t *data;
	uint32_t size;
};

/* Finds a tree's root block: in the root tree or, for TREE_ROOT and TREE_CHUNK, the superblock.
 * Returns -ENOENT, with a reason, if there is no such tree. */
int tree_root_find(struct reader *reader, uint64_t objectid, struct block_expect *root);

/* Reads the ROOT_ITEM at the cursor. In `item`, fields that an old, short item lacks are 0. */
int tree_root_of_item(struct cursor *cursor, struct disk_root *item, struct block_expect *root);

/* Sets the root block of TREE_ROOT or TREE_CHUNK. */
void tree_root_of_super(const struct reader *reader, uint64_t objectid, struct block_expect *root);

/* Reads nothing yet. `reader` has to outlive the cursor. */
void cursor_init(struct cursor *cursor, struct reader *reader, const struct block_expect *root);
void cursor_close(struct cursor *cursor);

/* Each returns 1 with the cursor on an item, 0 when no item is left, or a negative errno. */
int cursor_first(struct cursor *cursor);
int cursor_next(struct cursor *cursor);
/* Goes to the first item whose key is not smaller than `key`. */
int cursor_seek(struct cursor *cursor, const struct key *key);

/* Goes to the item with this key. Returns 0, -ENOENT with a reason, or another negative errno. */
int cursor_find(struct cursor *cursor, const struct key *key);

/* Copies the first `size` bytes of the item. Returns -EUCLEAN when it is shorter. */
int cursor_copy(struct cursor *cursor, void *data, size_t size);

enum { CURSOR_NAME_BYTES = BLOCK_NAME_BYTES + KEY_TEXT_BYTES + 24 };

/* "extent tree, leaf at 30490624, item 17 (257 EXTENT_DATA 0)" */
const char *cursor_name(const struct cursor *cursor, char text[static CURSOR_NAME_BYTES]);

/* Calls reader_fail(-EUCLEAN) with the item's name in front of the message. */
int cursor_fail(struct cursor *cursor, const char *format, ...)
	__attribute__((format(printf, 2, 3)));
