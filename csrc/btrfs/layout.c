/* SPDX-License-Identifier: MIT */
#include "btrfs/layout.h"

#include <errno.h>
#include <string.h>
#include <sys/stat.h>

#include "base/cleanup.h"
#include "btrfs/cursor.h"
#include "btrfs/inode.h"
#include "btrfs/seed.h"

const char *layout_strategy_name(enum layout_strategy strategy)
{
	switch (strategy) {
	case STRATEGY_MEGA_EXTENT:
		return "mega-extent";
	case STRATEGY_FALLOCATE:
		return "fallocate";
	default:
		return "other";
	}
}

const char *chunk_type_name(uint64_t type)
{
	switch (type & CHUNK_TYPE_MASK) {
	case CHUNK_DATA:
		return "DATA";
	case CHUNK_SYSTEM:
		return "SYSTEM";
	case CHUNK_METADATA:
		return "METADATA";
	case CHUNK_DATA | CHUNK_METADATA:
		return "DATA+METADATA";
	default:
		return "unknown";
	}
}

const char *chunk_profile_name(uint64_t type)
{
	if (type & CHUNK_DUP)
		return "DUP";
	return type & CHUNK_RAID0 ? "RAID0" : "SINGLE";
}

/* The state of a pass over the file tree: the inode that it is at. */
struct pass {
	struct layout *layout;
	struct virtual_file file;
	bool is_candidate;
};

/* Takes the finished inode as the virtual file if it is the largest candidate so far. */
static void finish_inode(struct pass *pass)
{
	struct layout *layout = pass->layout;
	struct virtual_file *best = &layout->file;

	if (pass->is_candidate &&
	    (!layout->has_file || le64toh(pass->file.inode.size) > le64toh(best->inode.size))) {
		layout->other_bytes += best->data_bytes;
		*best = pass->file;
		layout->has_file = true;
	} else {
		layout->other_bytes += pass->file.data_bytes;
	}
	pass->file = (struct virtual_file){ 0 };
	pass->is_candidate = false;
}

static int take_inode(struct pass *pass, struct cursor *cursor)
{
	struct disk_inode *inode = &pass->file.inode;
	int ret;

	finish_inode(pass);
	pass->file.inode_number = cursor->key.objectid;
	ret = cursor_copy(cursor, inode, sizeof(*inode));
	pass->is_candidate =
		!ret && S_ISREG(le32toh(inode->mode)) && le64toh(inode->flags) & INODE_NODATASUM &&
		le64toh(inode->size) >= SEED_VIRTUAL_MIN_BYTES && le64toh(inode->size) <= INT64_MAX;
	return ret;
}

static int take_name(struct virtual_file *file, struct cursor *cursor)
{
	struct disk_inode_ref ref;
	size_t length;
	int ret = cursor_copy(cursor, &ref, sizeof(ref));

	if (ret || file->name[0])
		return ret;
	length = le16toh(ref.name_length);
	if (!length || length > NAME_MAX_BYTES || length > cursor->size - sizeof(ref))
		return cursor_fail(cursor, "a name of %zu bytes cannot be", length);
	memcpy(file->name, cursor->data + sizeof(ref), length);
	file->name[length] = 0;
	file->parent = cursor->key.offset;
	file->name_index = le64toh(ref.index);
	return 0;
}

static int take_extent(struct virtual_file *file, struct cursor *cursor)
{
	struct disk_file_extent extent;
	size_t inline_bytes = offsetof(struct disk_file_extent, disk_bytenr);
	int ret = cursor_copy(cursor, &extent, inline_bytes);

	if (ret || extent.type == FILE_EXTENT_INLINE)
		return ret;
	ret = cursor_copy(cursor, &extent, sizeof(extent));
	if (ret || !extent.disk_bytenr)
		return ret;
	if (!file->extent_count++)
		file->logical = le64toh(extent.disk_bytenr) + le64toh(extent.offset);
	file->prealloc_count += extent.type == FILE_EXTENT_PREALLOC;
	file->data_bytes += le64toh(extent.bytes);
	return 0;
}

static int read_files(struct reader *reader, struct layout *layout)
{
	_cleanup_(cursor_close) struct cursor cursor = { 0 };
	struct pass pass = { .layout = layout };
	struct block_expect root;
	int ret = tree_root_find(reader, TREE_FS, &root);

	if (ret)
		return ret;
	cursor_init(&cursor, reader, &root);
	for (ret = cursor_first(&cursor); ret > 0; ret = cursor_next(&cursor)) {
		bool same_inode = cursor.key.objectid == pass.file.inode_number;

		ret = 0;
		if (cursor.key.type == KEY_INODE_ITEM)
			ret = take_inode(&pass, &cursor);
		else if (cursor.key.type == KEY_INODE_REF && same_inode)
			ret = take_name(&pass.file, &cursor);
		else if (cursor.key.type == KEY_EXTENT_DATA && same_inode)
			ret = take_extent(&pass.file, &cursor);
		if (ret)
			return ret;
	}
	finish_inode(&pass);
	return ret;
}

static int count_subvolumes(struct reader *reader, struct layout *layout)
{
	_cleanup_(cursor_close) struct cursor cursor = { 0 };
	struct block_expect root;
	int ret;

	tree_root_of_super(reader, TREE_ROOT, &root);
	cursor_init(&cursor, reader, &root);
	for (ret = cursor_first(&cursor); ret > 0; ret = cursor_next(&cursor))
		layout->subvolume_count += cursor.key.type == KEY_ROOT_ITEM &&
					   cursor.key.objectid != TREE_DATA_RELOC &&
					   tree_holds_files(cursor.key.objectid);
	return ret;
}

/* Reads the entry "default" in the root tree. Without it, the top-level subvolume is mounted. */
static int find_default(struct reader *reader, uint64_t *subvolume)
{
	_cleanup_(cursor_close) struct cursor cursor = { 0 };
	static const char name[] = "default";
	struct key key = { TREE_ROOT_DIR, KEY_DIR_ITEM, dir_name_hash(name, strlen(name)) };
	struct disk_dir_item entry;
	struct block_expect root;
	int ret;

	*subvolume = TREE_FS;
	tree_root_of_super(reader, TREE_ROOT, &root);
	cursor_init(&cursor, reader, &root);
	ret = cursor_find(&cursor, &key);
	if (ret == -ENOENT)
		return 0;
	if (!ret)
		ret = cursor_copy(&cursor, &entry, sizeof(entry));
	if (!ret)
		*subvolume = le64toh(entry.location.objectid);
	return ret;
}

/* Reads the flags that new files inherit. A missing default subvolume is left to the check. */
static int find_top_flags(struct reader *reader, struct layout *layout)
{
	_cleanup_(cursor_close) struct cursor cursor = { 0 };
	struct key key = { OBJECT_FIRST_FREE, KEY_INODE_ITEM, 0 };
	struct disk_inode inode;
	struct block_expect root;
	int ret = tree_root_find(reader, layout->default_subvolume, &root);

	if (ret == -ENOENT)
		return 0;
	if (!ret) {
		cursor_init(&cursor, reader, &root);
		ret = cursor_find(&cursor, &key);
	}
	if (!ret)
		ret = cursor_copy(&cursor, &inode, sizeof(inode));
	if (!ret)
		layout->top_flags = le64toh(inode.flags);
	return ret;
}

int layout_find(struct reader *reader, struct layout *layout)
{
	int ret;

	*layout = (struct layout){
		.is_seeding = le64toh(reader->super.flags) & SUPER_SEEDING,
	};
	/*
	 * Our seeds are written as one transaction. mkfs.btrfs makes more, and each later change
	 * of a file system makes another one.
	 */
	if (reader->generation == SEED_GENERATION)
		layout->strategy = STRATEGY_MEGA_EXTENT;
	ret = count_subvolumes(reader, layout);
	if (!ret)
		ret = find_default(reader, &layout->default_subvolume);
	if (!ret)
		ret = find_top_flags(reader, layout);
	if (!ret)
		ret = read_files(reader, layout);
	if (ret)
		return ret;
	if (layout->strategy == STRATEGY_OTHER) {
		if (layout->is_seeding && layout->has_file &&
		    layout->file.data_bytes > layout->other_bytes)
			layout->strategy = STRATEGY_FALLOCATE;
		else
			layout->has_file = false;
	}
	return 0;
}
