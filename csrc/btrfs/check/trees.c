/* SPDX-License-Identifier: MIT */
/* Walks all trees, and verifies every block and its copies. */
#include "base/cleanup.h"
#include "btrfs/check/internal.h"

static int visit(struct walk *walk, const struct block_expect *expect, void *block)
{
	int ret = reader_compare_copies(walk->reader, expect, block);

	return ret ? check_damage(walk->context, RULE_COPY, ret) : 0;
}

static int damaged(struct walk *walk, const struct block_expect *expect, int error_number)
{
	(void)expect;
	return check_damage(walk->context, RULE_TREE, error_number);
}

static int walk_root_item(struct walk *walk, struct cursor *cursor)
{
	struct block_expect root;
	struct disk_root item;
	int ret = tree_root_of_item(cursor, &item, &root);

	if (ret)
		return check_damage(walk->context, RULE_TREE, ret);
	/* A tree without references is being removed, so that parts of it are gone. */
	return item.refs ? tree_walk(walk, &root) : 0;
}

static int walk_all(struct walk *walk)
{
	_cleanup_(cursor_close) struct cursor cursor = { 0 };
	struct block_expect root;
	int ret;

	tree_root_of_super(walk->reader, TREE_CHUNK, &root);
	ret = tree_walk(walk, &root);
	if (ret)
		return ret;
	tree_root_of_super(walk->reader, TREE_ROOT, &root);
	ret = tree_walk(walk, &root);
	if (ret)
		return ret;
	cursor_init(&cursor, walk->reader, &root);
	for (ret = cursor_first(&cursor); ret > 0; ret = cursor_next(&cursor)) {
		if (cursor.key.type != KEY_ROOT_ITEM)
			continue;
		ret = walk_root_item(walk, &cursor);
		if (ret)
			return ret;
	}
	return ret < 0 ? check_damage(walk->context, RULE_TREE, ret) : 0;
}

int check_walk_trees(struct check *check)
{
	_cleanup_(block_set_deinit) struct block_set blocks = { 0 };
	struct walk walk = {
		.reader = check->reader,
		.visited = &blocks,
		.visit = visit,
		.damaged = damaged,
		.context = check,
	};
	int ret = walk_all(&walk);

	check->report->tree_blocks = blocks.count;
	return ret;
}
