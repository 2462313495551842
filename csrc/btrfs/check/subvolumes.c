/* SPDX-License-Identifier: MIT */
/*
 * Checks that the back reference of each subvolume, the parent's reference and the directory entry
 * there agree, and that the default subvolume, which a plain mount shows, exists. Sources: struct
 * btrfs_root_ref, btrfs_add_root_ref in the kernel's root-tree.c.
 */
#include <errno.h>
#include <inttypes.h>
#include <string.h>

#include "base/cleanup.h"
#include "btrfs/check/internal.h"
#include "btrfs/inode.h"

/* A ROOT_BACKREF: the subvolume `id` is in `parent`, under this name. */
struct place {
	uint64_t id;
	uint64_t parent;
	uint64_t directory;
	uint64_t sequence;
	size_t length;
	char name[NAME_MAX_BYTES];
};

static int read_place(struct cursor *cursor, struct place *place)
{
	struct disk_root_ref ref;
	int ret = cursor_copy(cursor, &ref, sizeof(ref));

	if (ret)
		return ret;
	*place = (struct place){
		.id = cursor->key.objectid,
		.parent = cursor->key.offset,
		.directory = le64toh(ref.directory),
		.sequence = le64toh(ref.sequence),
		.length = le16toh(ref.name_length),
	};
	if (!place->length || place->length > NAME_MAX_BYTES ||
	    place->length != cursor->size - sizeof(ref))
		return cursor_fail(cursor, "a name of %zu bytes cannot be", place->length);
	memcpy(place->name, cursor->data + sizeof(ref), place->length);
	return 0;
}

/* Checks the entries in the item, as names with the same hash share an item. */
static bool leads_to(const struct cursor *cursor, const struct place *place)
{
	struct disk_dir_item entry;
	size_t size;

	for (size_t at = 0; at + sizeof(entry) <= cursor->size; at += size) {
		memcpy(&entry, cursor->data + at, sizeof(entry));
		size = sizeof(entry) + le16toh(entry.name_length) + le16toh(entry.data_length);
		if (size > cursor->size - at)
			return false;
		if (le16toh(entry.name_length) == place->length &&
		    !memcmp(cursor->data + at + sizeof(entry), place->name, place->length))
			return le64toh(entry.location.objectid) == place->id &&
			       entry.location.type == KEY_ROOT_ITEM && entry.type == ENTRY_DIR;
	}
	return false;
}

static int check_entry(struct cursor *cursor, const struct key *key, const struct place *place)
{
	int ret = cursor_find(cursor, key);

	if (!ret && !leads_to(cursor, place))
		ret = cursor_fail(cursor, "it does not lead to subvolume %" PRIu64, place->id);
	return ret;
}

static int check_entries(struct check *check, const struct place *place)
{
	_cleanup_(cursor_close) struct cursor cursor = { 0 };
	struct key key = { place->directory, KEY_DIR_ITEM,
			   dir_name_hash(place->name, place->length) };
	struct block_expect root;
	int ret = tree_root_find(check->reader, place->parent, &root);

	if (ret)
		return check_damage(check, RULE_SUBVOLUME, ret);
	cursor_init(&cursor, check->reader, &root);
	ret = check_damage(check, RULE_SUBVOLUME, check_entry(&cursor, &key, place));
	if (ret)
		return ret;
	key = (struct key){ place->directory, KEY_DIR_INDEX, place->sequence };
	return check_damage(check, RULE_SUBVOLUME, check_entry(&cursor, &key, place));
}

/* Checks that the parent's reference is the same as the back reference. */
static int check_reference(struct check *check, const struct place *place)
{
	_cleanup_(cursor_close) struct cursor cursor = { 0 };
	struct key key = { place->parent, KEY_ROOT_REF, place->id };
	struct block_expect root;
	struct place other;
	int ret;

	tree_root_of_super(check->reader, TREE_ROOT, &root);
	cursor_init(&cursor, check->reader, &root);
	ret = cursor_find(&cursor, &key);
	if (!ret)
		ret = read_place(&cursor, &other);
	if (!ret &&
	    (other.directory != place->directory || other.sequence != place->sequence ||
	     other.length != place->length || memcmp(other.name, place->name, place->length) != 0))
		ret = cursor_fail(&cursor, "the back reference of %" PRIu64 " says another place",
				  place->id);
	return check_damage(check, RULE_SUBVOLUME, ret);
}

static int check_one(struct check *check, struct cursor *roots)
{
	_cleanup_(cursor_close) struct cursor cursor = { 0 };
	struct key first = { roots->key.objectid, KEY_ROOT_BACKREF, 0 };
	struct place place;
	int ret;

	cursor_init(&cursor, check->reader, &roots->root);
	ret = cursor_seek(&cursor, &first);
	if (ret < 0)
		return check_damage(check, RULE_SUBVOLUME, ret);
	if (!ret || cursor.key.objectid != first.objectid || cursor.key.type != first.type) {
		cursor_fail(roots, "nothing says where this subvolume is (ROOT_BACKREF)");
		report_add(check->report, RULE_SUBVOLUME, "%s", check->reader->error);
		return 0;
	}
	ret = read_place(&cursor, &place);
	if (ret)
		return check_damage(check, RULE_SUBVOLUME, ret);
	ret = check_reference(check, &place);
	return ret ?: check_entries(check, &place);
}

int check_subvolumes(struct check *check)
{
	_cleanup_(cursor_close) struct cursor cursor = { 0 };
	struct block_expect root;
	struct disk_root item;
	bool has_default = false;
	int ret;

	tree_root_of_super(check->reader, TREE_ROOT, &root);
	cursor_init(&cursor, check->reader, &root);
	for (ret = cursor_first(&cursor); ret > 0; ret = cursor_next(&cursor)) {
		uint64_t id = cursor.key.objectid;

		if (cursor.key.type != KEY_ROOT_ITEM || !tree_holds_files(id) ||
		    id == TREE_DATA_RELOC)
			continue;
		has_default |= id == check->layout->default_subvolume;
		/* trees.c reports damaged root items. No references: it is being deleted. */
		if (id == TREE_FS || tree_root_of_item(&cursor, &item, &root) || !item.refs)
			continue;
		ret = check_one(check, &cursor);
		if (ret)
			return ret;
	}
	if (ret < 0)
		return check_damage(check, RULE_TREE, ret);
	if (!has_default)
		report_add(check->report, RULE_SUBVOLUME,
			   "root tree: the default subvolume is %" PRIu64 ", which does not exist",
			   check->layout->default_subvolume);
	return 0;
}
