/* SPDX-License-Identifier: MIT */
#include "image/emit_inode.h"

#include <errno.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "base/array.h"

enum { LINKS_MAX = 65535 }; /* BTRFS_LINK_MAX */

void emit_tree_deinit(struct emit_tree *emit)
{
	free(emit->names);
	free(emit->entries);
	emit->names = NULL;
	emit->entries = NULL;
}

static uint8_t entry_type(uint32_t mode)
{
	switch (mode & S_IFMT) {
	case S_IFDIR:
		return ENTRY_DIR;
	case S_IFLNK:
		return ENTRY_SYMLINK;
	case S_IFCHR:
		return ENTRY_CHARACTER_DEVICE;
	case S_IFBLK:
		return ENTRY_BLOCK_DEVICE;
	case S_IFIFO:
		return ENTRY_FIFO;
	case S_IFSOCK:
		return ENTRY_SOCKET;
	default:
		return ENTRY_FILE;
	}
}

/* Returns how many bytes of a file its extents cover, whole sectors (nbytes in the kernel). */
static uint64_t covered_bytes(const struct model *model, const struct model_inode *inode)
{
	uint64_t bytes = 0;

	if (S_ISLNK(inode->mode) || (S_ISREG(inode->mode) && inode->content == MODEL_SPOOLED))
		return inode->bytes;
	if (!S_ISREG(inode->mode) || inode->content != MODEL_EXTENTS)
		return 0;
	for (uint32_t i = 0; i < inode->extents.count; i++)
		bytes += model_extent(model, inode->extents.first + i)->bytes;
	return bytes;
}

static struct disk_inode make_inode(const struct emit_tree *emit, const struct tree_builder *tree,
				    const struct model_inode *inode)
{
	bool is_directory = S_ISDIR(inode->mode);
	struct disk_time time = time_make(inode->mtime_s, inode->mtime_ns);
	struct disk_inode disk = {
		.generation = htole64(tree->format->generation),
		.transid = htole64(tree->format->generation),
		/* A directory counts each name twice, as it has two items for it. */
		.size = htole64(is_directory ? 2 * inode->bytes : inode->bytes),
		.byte_count = htole64(covered_bytes(emit->model, inode)),
		.link_count = htole32(inode->links),
		.uid = htole32(inode->uid),
		.gid = htole32(inode->gid),
		.mode = htole32(inode->mode),
		.accessed = time,
		.changed = time,
		.modified = time,
		.created = time,
	};

	if (S_ISCHR(inode->mode) || S_ISBLK(inode->mode)) {
		/* The kernel's own dev_t: 20 bits of minor number. */
		disk.size = 0;
		disk.rdev = htole64((uint64_t)inode->device.major << 20 | inode->device.minor);
	}
	return disk;
}

static int emit_names(struct emit_tree *emit, struct tree_builder *tree, uint32_t number)
{
	const struct model *model = emit->model;
	size_t count = 0;
	int ret = 0;

	if (number == MODEL_ROOT)
		return inode_top_add(tree, number);
	for (uint32_t at = model_inode(model, number)->name; at && !ret;) {
		const struct model_entry *entry = model_entry(model, at);

		ret = array_reserve(emit->names, emit->name_capacity, count + 1);
		if (!ret)
			emit->names[count++] = (struct inode_name){
				.parent = entry->parent,
				.index = entry->index,
				.name = model_name(model, entry),
				.length = entry->name_bytes,
			};
		at = entry->next_of_inode;
	}
	return ret ?: inode_names_add(tree, number, emit->names, count);
}

static int emit_attributes(struct emit_tree *emit, struct tree_builder *tree, uint32_t number)
{
	uint32_t place = model_inode(emit->model, number)->attributes;
	struct model_attribute attribute;
	size_t count = 0;
	int ret = 0;

	while (!ret && model_attribute_next(emit->model, &place, &attribute)) {
		ret = array_reserve(emit->entries, emit->entry_capacity, count + 1);
		if (!ret)
			emit->entries[count++] = (struct dir_entry){
				.name = attribute.name,
				.length = attribute.name_bytes,
				.value = attribute.value,
				.value_bytes = attribute.value_bytes,
				.type = ENTRY_XATTR,
			};
	}
	return ret ?: xattrs_add(tree, number, emit->entries, count);
}

static int emit_entries(struct emit_tree *emit, struct tree_builder *tree, uint32_t number)
{
	const struct model *model = emit->model;
	size_t count = 0;
	int ret = 0;

	for (uint32_t at = model_inode(model, number)->directory.first; at && !ret;) {
		const struct model_entry *entry = model_entry(model, at);

		ret = array_reserve(emit->entries, emit->entry_capacity, count + 1);
		if (!ret)
			emit->entries[count++] = (struct dir_entry){
				.name = model_name(model, entry),
				.length = entry->name_bytes,
				.target = { entry->inode, KEY_INODE_ITEM, 0 },
				.index = entry->index,
				.type = entry_type(model_inode(model, entry->inode)->mode),
			};
		at = entry->next;
	}
	return ret ?: dir_entries_add(tree, number, emit->entries, count);
}

static int emit_inline(struct emit_tree *emit, struct tree_builder *tree, uint32_t number)
{
	const struct model_inode *inode = model_inode(emit->model, number);
	uint8_t bytes[DATA_INLINE_BYTES_MAX];
	size_t stored = inode->spool.stored_bytes;
	int ret = data_read_inline(emit->data, inode->spool.offset, bytes, stored);

	return ret ? ret :
		     file_inline_add(tree, number, bytes, stored, inode->bytes, inode->compression);
}

static int emit_extents(struct emit_tree *emit, struct tree_builder *tree, uint32_t number)
{
	const struct model_inode *inode = model_inode(emit->model, number);
	int ret = 0;

	for (uint32_t i = 0; i < inode->extents.count && !ret; i++) {
		const struct model_extent *extent =
			model_extent(emit->model, inode->extents.first + i);
		struct file_extent file_extent = {
			.offset = extent->file_offset,
			.bytes = extent->bytes,
			.disk_bytenr = emit->data_start + extent->data_offset,
			.disk_bytes = extent->stored_bytes,
			.compression = extent->compression,
		};

		ret = file_extent_add(tree, number, &file_extent);
	}
	return ret;
}

static int emit_content(struct emit_tree *emit, struct tree_builder *tree, uint32_t number)
{
	const struct model_inode *inode = model_inode(emit->model, number);

	if (S_ISDIR(inode->mode))
		return emit_entries(emit, tree, number);
	if (S_ISLNK(inode->mode))
		return file_inline_add(tree, number, model_target(emit->model, inode), inode->bytes,
				       inode->bytes, COMPRESSION_NONE);
	if (S_ISREG(inode->mode) && inode->content == MODEL_SPOOLED)
		return emit_inline(emit, tree, number);
	if (S_ISREG(inode->mode) && inode->content == MODEL_EXTENTS)
		return emit_extents(emit, tree, number);
	return 0;
}

static int emit_inode(struct emit_tree *emit, struct tree_builder *tree, uint32_t number)
{
	struct disk_inode disk = make_inode(emit, tree, model_inode(emit->model, number));
	int ret;

	if (model_inode(emit->model, number)->links > LINKS_MAX)
		return -EMLINK;
	ret = inode_add(tree, number, &disk);
	if (!ret)
		ret = emit_names(emit, tree, number);
	if (!ret)
		ret = emit_attributes(emit, tree, number);
	return ret ?: emit_content(emit, tree, number);
}

/* Says which file it is that the file system cannot hold. */
static void explain(struct emit_tree *emit, uint32_t number, int err)
{
	const struct model_inode *inode = model_inode(emit->model, number);
	char path[PATH_MAX] = "/";

	if (err != -E2BIG && err != -EMLINK)
		return;
	if (inode->name)
		model_path(emit->model, inode->name, path, sizeof(path));
	emit->has_error = true;
	if (err == -EMLINK) {
		error_set_text(emit->error, "%s: btrfs cannot hold it: it has %u names", path,
			       inode->links);
		error_set_hint(emit->error, "a file may have %d names", LINKS_MAX);
		return;
	}
	error_set_text(emit->error, "%s: btrfs cannot hold it: %s", path,
		       S_ISDIR(inode->mode) ?
			       "too many names have the same hash, or an attribute is too long" :
			       "an attribute, or the names whose hash is the same, are too long");
	error_set_hint(emit->error, "what has one hash may have about 16 KiB together");
}

int emit_tree(struct image *image, struct tree_builder *tree, void *context)
{
	struct emit_tree *emit = context;
	uint32_t number = 0;
	int ret = 0;

	while (!ret && (number = model_next(emit->model, number))) {
		ret = emit_inode(emit, tree, number);
		if (ret)
			explain(emit, number, ret);
	}
	return ret;
}
