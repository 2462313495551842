/* SPDX-License-Identifier: MIT */
/*
 * Walks all trees, verifies every block, and collects the references from blocks and from file
 * extents. A reference's origin follows __btrfs_mod_ref in the kernel's extent-tree.c: it is the
 * address of a block with FULL_BACKREF, and otherwise the block's owner.
 */
#include <errno.h>
#include <inttypes.h>
#include <string.h>

#include "base/cleanup.h"
#include "btrfs/check/internal.h"

#define EXTENT_FULL_BACKREF (1ULL << 8)	   /* BTRFS_BLOCK_FLAG_FULL_BACKREF */
#define TREE_RELOC_OBJECTID ((uint64_t)-8) /* of a balance that was interrupted */

static bool has_full_backref(const struct check *check, uint64_t bytenr)
{
	const struct used *used = check_find_used(check, bytenr);

	return used && used->flags & EXTENT_FULL_BACKREF;
}

static int add_pointer(struct check *check, const struct block_expect *child, bool full,
		       uint64_t origin)
{
	struct ref ref = {
		.start = child->bytenr,
		.type = full ? KEY_SHARED_BLOCK_REF : KEY_TREE_BLOCK_REF,
		.origin = origin,
		.length = check->reader->node_bytes,
		.count = 1,
		.level = child->level,
	};

	return ref_list_add(&check->made, &ref);
}

static int visit_node(struct check *check, const struct block_expect *expect, const void *node)
{
	bool full = has_full_backref(check, expect->bytenr);
	uint64_t owner = le64toh(((const struct disk_header *)node)->owner);
	int ret = 0;

	for (uint32_t i = 0; i < block_count(node) && !ret; i++) {
		struct block_expect child = block_child(expect, node, i);

		ret = add_pointer(check, &child, full, full ? expect->bytenr : owner);
	}
	return ret;
}

static void bad_extent(struct check *check, const struct block_expect *expect, uint32_t slot,
		       const struct key *key, const char *problem)
{
	char block[BLOCK_NAME_BYTES], text[KEY_TEXT_BYTES];

	report_add(check->report, RULE_REFERENCE, "%s, item %" PRIu32 " %s: %s",
		   block_name(expect, block), slot, key_text(key, text), problem);
}

static int visit_file_extent(struct check *check, const struct block_expect *expect, void *leaf,
			     uint32_t slot)
{
	const struct disk_item *item = block_item(leaf, slot);
	const size_t inline_bytes = offsetof(struct disk_file_extent, disk_bytenr);
	bool full = has_full_backref(check, expect->bytenr);
	uint64_t owner = le64toh(((struct disk_header *)leaf)->owner);
	struct key key = key_from_disk(&item->key);
	struct disk_file_extent extent = { 0 };
	uint64_t bytes;
	struct ref ref;

	if (le32toh(item->size) >= inline_bytes)
		memcpy(&extent, block_item_data(leaf, item), inline_bytes);
	if (le32toh(item->size) >= sizeof(extent))
		memcpy(&extent, block_item_data(leaf, item), sizeof(extent));
	else if (extent.type != FILE_EXTENT_INLINE || le32toh(item->size) < inline_bytes)
		bad_extent(check, expect, slot, &key, "it is cut off");
	if (extent.type > FILE_EXTENT_PREALLOC)
		bad_extent(check, expect, slot, &key, "its type is unknown");
	if (extent.type == FILE_EXTENT_INLINE || !extent.disk_bytenr)
		return 0;
	bytes = le64toh(extent.bytes);
	if (!bytes || bytes > le64toh(extent.ram_bytes) ||
	    le64toh(extent.offset) > le64toh(extent.ram_bytes) - bytes)
		bad_extent(check, expect, slot, &key, "its range is not within the extent's");
	ref = (struct ref){
		.start = le64toh(extent.disk_bytenr),
		.type = full ? KEY_SHARED_DATA_REF : KEY_EXTENT_DATA_REF,
		.origin = full ? expect->bytenr : owner,
		.objectid = full ? 0 : key.objectid,
		.offset = full ? 0 : key.offset - le64toh(extent.offset),
		.length = le64toh(extent.disk_bytes),
		.count = 1,
	};
	return ref_list_add(&check->made, &ref);
}

static int visit(struct walk *walk, const struct block_expect *expect, void *block)
{
	struct check *check = walk->context;
	int ret = reader_compare_copies(walk->reader, expect, block);

	if (ret)
		ret = check_damage(check, RULE_COPY, ret);
	if (ret)
		return ret;
	if (expect->level)
		return visit_node(check, expect, block);
	/* The root tree, too, has file extents if there is a free-space cache. */
	if (expect->tree != TREE_ROOT && !tree_holds_files(expect->tree))
		return 0;
	for (uint32_t i = 0; i < block_count(block) && !ret; i++) {
		if (block_key(block, i).type == KEY_EXTENT_DATA)
			ret = visit_file_extent(check, expect, block, i);
	}
	return ret;
}

static int damaged(struct walk *walk, const struct block_expect *expect, int error_number)
{
	struct check *check = walk->context;

	check->refs_known = false;
	return check_damage(check, RULE_TREE, error_number);
}

static int walk_tree(struct check *check, const struct block_expect *root)
{
	struct walk walk = {
		.reader = check->reader,
		.visited = &check->blocks,
		.visit = visit,
		.damaged = damaged,
		.context = check,
	};
	int ret = add_pointer(check, root, false, root->tree);

	return ret ?: tree_walk(&walk, root);
}

static int walk_root_item(struct check *check, struct cursor *cursor)
{
	struct block_expect root;
	struct disk_root item;
	int ret = tree_root_of_item(cursor, &item, &root);

	if (ret) {
		check->refs_known = false;
		return check_damage(check, RULE_TREE, ret);
	}
	if (!item.refs || root.tree == TREE_RELOC_OBJECTID) {
		check->refs_known = false;
		report_note(check->report,
			    "references were not compared, as the removal of tree %" PRIu64
			    " is not finished",
			    root.tree);
		return 0;
	}
	return walk_tree(check, &root);
}

int check_walk_trees(struct check *check)
{
	_cleanup_(cursor_close) struct cursor cursor = { 0 };
	struct block_expect root;
	int ret;

	check->refs_known = true;
	tree_root_of_super(check->reader, TREE_CHUNK, &root);
	ret = walk_tree(check, &root);
	if (ret)
		return ret;
	tree_root_of_super(check->reader, TREE_ROOT, &root);
	ret = walk_tree(check, &root);
	if (ret)
		return ret;
	cursor_init(&cursor, check->reader, &root);
	for (ret = cursor_first(&cursor); ret > 0; ret = cursor_next(&cursor)) {
		if (cursor.key.type != KEY_ROOT_ITEM)
			continue;
		ret = walk_root_item(check, &cursor);
		if (ret)
			return ret;
	}
	return ret < 0 ? check_damage(check, RULE_TREE, ret) : 0;
}
