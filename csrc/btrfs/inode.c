/* SPDX-License-Identifier: MIT */
#include "btrfs/inode.h"

#include <errno.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

/* An item that is put together from several parts. */
struct item {
	uint8_t *bytes;
	size_t used;
	size_t capacity;
};

static int item_append(struct item *item, const void *data, size_t size)
{
	if (!size)
		return 0;
	if (size > item->capacity - item->used)
		return -E2BIG;
	memcpy(item->bytes + item->used, data, size);
	item->used += size;
	return 0;
}

static int item_init(struct item *item, const struct tree_builder *tree)
{
	*item = (struct item){ .capacity = tree_item_max_bytes(tree->format) };
	item->bytes = malloc(item->capacity);
	return item->bytes ? 0 : -ENOMEM;
}

struct disk_time time_make(int64_t seconds, uint32_t nanoseconds)
{
	return (struct disk_time){
		.seconds = htole64((uint64_t)seconds),
		.nanoseconds = htole32(nanoseconds),
	};
}

struct disk_inode inode_make(uint64_t generation, int64_t time, uint32_t mode)
{
	return (struct disk_inode){
		.generation = htole64(generation),
		.transid = htole64(generation),
		.link_count = htole32(1),
		.mode = htole32(mode),
		.accessed = time_make(time, 0),
		.changed = time_make(time, 0),
		.modified = time_make(time, 0),
		.created = time_make(time, 0),
	};
}

int inode_add(struct tree_builder *tree, uint64_t inode_number, const struct disk_inode *inode)
{
	struct key key = { inode_number, KEY_INODE_ITEM, 0 };

	return tree_add(tree, &key, inode, sizeof(*inode));
}

static int compare_bytes(const char *a, size_t a_length, const char *b, size_t b_length)
{
	int order = memcmp(a, b, a_length < b_length ? a_length : b_length);

	return order ? order : (a_length > b_length) - (a_length < b_length);
}

static int compare_names(const void *left, const void *right)
{
	const struct inode_name *a = left, *b = right;

	if (a->parent != b->parent)
		return a->parent < b->parent ? -1 : 1;
	return (a->index > b->index) - (a->index < b->index);
}

/* btrfs_extref_hash */
static uint64_t extended_hash(const struct inode_name *name)
{
	return crc32c_raw((uint32_t)name->parent, name->name, name->length);
}

static int compare_extended(const void *left, const void *right)
{
	uint64_t a = extended_hash(left), b = extended_hash(right);

	return a != b ? (a < b ? -1 : 1) : compare_names(left, right);
}

/* Appends names of one directory to an item, until it is full; returns how many. */
static size_t append_names(struct item *item, const struct inode_name *names, size_t count)
{
	size_t i;

	item->used = 0;
	for (i = 0; i < count && names[i].parent == names->parent; i++) {
		struct disk_inode_ref ref = {
			.index = htole64(names[i].index),
			.name_length = htole16((uint16_t)names[i].length),
		};

		if (item->used + sizeof(ref) + names[i].length > item->capacity)
			break;
		item_append(item, &ref, sizeof(ref));
		item_append(item, names[i].name, names[i].length);
	}
	return i;
}

static int add_extended(struct tree_builder *tree, uint64_t inode_number, struct item *item,
			struct inode_name *names, size_t count)
{
	size_t i = 0;
	int ret = 0;

	qsort(names, count, sizeof(*names), compare_extended);
	while (!ret && i < count) {
		struct key key = { inode_number, KEY_INODE_EXTREF, extended_hash(&names[i]) };

		item->used = 0;
		for (; !ret && i < count && extended_hash(&names[i]) == key.offset; i++) {
			struct disk_inode_extref ref = {
				.parent = htole64(names[i].parent),
				.index = htole64(names[i].index),
				.name_length = htole16((uint16_t)names[i].length),
			};

			ret = item_append(item, &ref, sizeof(ref));
			if (!ret)
				ret = item_append(item, names[i].name, names[i].length);
		}
		if (!ret)
			ret = tree_add(tree, &key, item->bytes, item->used);
	}
	return ret;
}

int inode_names_add(struct tree_builder *tree, uint64_t inode_number, struct inode_name *names,
		    size_t count)
{
	size_t extended = 0, i = 0;
	struct item item;
	int ret;

	for (size_t n = 0; n < count; n++) {
		if (names[n].length > NAME_MAX_BYTES)
			return -ENAMETOOLONG;
	}
	ret = item_init(&item, tree);
	if (ret)
		return ret;
	qsort(names, count, sizeof(*names), compare_names);
	while (!ret && i < count) {
		struct key key = { inode_number, KEY_INODE_REF, names[i].parent };
		size_t taken = append_names(&item, names + i, count - i);

		ret = tree_add(tree, &key, item.bytes, item.used);
		/* What had no room moves to the front, over names that are written already. */
		for (i += taken; i < count && names[i].parent == key.offset; i++)
			names[extended++] = names[i];
	}
	if (!ret)
		ret = add_extended(tree, inode_number, &item, names, extended);
	free(item.bytes);
	return ret;
}

int inode_top_add(struct tree_builder *tree, uint64_t inode_number)
{
	struct inode_name name = { inode_number, 0, "..", 2 };

	return inode_names_add(tree, inode_number, &name, 1);
}

static int item_append_entry(struct item *item, const struct tree_builder *tree,
			     const struct dir_entry *entry)
{
	struct disk_dir_item disk = {
		.location = key_to_disk(&entry->target),
		.transid = htole64(tree->format->generation),
		.data_length = htole16((uint16_t)entry->value_bytes),
		.name_length = htole16((uint16_t)entry->length),
		.type = entry->type,
	};
	int ret;

	if (entry->length > NAME_MAX_BYTES)
		return -ENAMETOOLONG;
	ret = item_append(item, &disk, sizeof(disk));
	if (!ret)
		ret = item_append(item, entry->name, entry->length);
	return ret ?: item_append(item, entry->value, entry->value_bytes);
}

uint64_t dir_name_hash(const char *name, size_t length)
{
	return crc32c_raw(~1u, name, length);
}

static int compare_hashes(const void *left, const void *right)
{
	const struct dir_entry *a = left, *b = right;

	if (a->hash != b->hash)
		return a->hash < b->hash ? -1 : 1;
	return compare_bytes(a->name, a->length, b->name, b->length);
}

static int compare_indices(const void *left, const void *right)
{
	const struct dir_entry *a = left, *b = right;

	return (a->index > b->index) - (a->index < b->index);
}

static int add_by_hash(struct tree_builder *tree, struct item *item, struct key key,
		       struct dir_entry *entries, size_t count)
{
	size_t i = 0;
	int ret = 0;

	for (size_t n = 0; n < count; n++)
		entries[n].hash = dir_name_hash(entries[n].name, entries[n].length);
	qsort(entries, count, sizeof(*entries), compare_hashes);
	while (!ret && i < count) {
		key.offset = entries[i].hash;
		item->used = 0;
		while (!ret && i < count && entries[i].hash == key.offset)
			ret = item_append_entry(item, tree, &entries[i++]);
		if (!ret)
			ret = tree_add(tree, &key, item->bytes, item->used);
	}
	return ret;
}

static int add_by_index(struct tree_builder *tree, struct item *item, uint64_t directory,
			struct dir_entry *entries, size_t count)
{
	int ret = 0;

	qsort(entries, count, sizeof(*entries), compare_indices);
	for (size_t i = 0; i < count && !ret; i++) {
		struct key key = { directory, KEY_DIR_INDEX, entries[i].index };

		item->used = 0;
		ret = item_append_entry(item, tree, &entries[i]);
		if (!ret)
			ret = tree_add(tree, &key, item->bytes, item->used);
	}
	return ret;
}

static int hashed_items_add(struct tree_builder *tree, struct key key, struct dir_entry *entries,
			    size_t count)
{
	struct item item;
	int ret;

	if (!count)
		return 0;
	ret = item_init(&item, tree);
	if (!ret)
		ret = add_by_hash(tree, &item, key, entries, count);
	free(item.bytes);
	return ret;
}

int dir_hashes_add(struct tree_builder *tree, uint64_t directory, struct dir_entry *entries,
		   size_t count)
{
	return hashed_items_add(tree, (struct key){ directory, KEY_DIR_ITEM, 0 }, entries, count);
}

int xattrs_add(struct tree_builder *tree, uint64_t inode_number, struct dir_entry *entries,
	       size_t count)
{
	return hashed_items_add(tree, (struct key){ inode_number, KEY_XATTR_ITEM, 0 }, entries,
				count);
}

int dir_entries_add(struct tree_builder *tree, uint64_t directory, struct dir_entry *entries,
		    size_t count)
{
	struct item item;
	int ret = dir_hashes_add(tree, directory, entries, count);

	if (!count)
		return ret;
	if (!ret)
		ret = item_init(&item, tree);
	if (!ret) {
		ret = add_by_index(tree, &item, directory, entries, count);
		free(item.bytes);
	}
	return ret;
}

int file_extent_add(struct tree_builder *tree, uint64_t inode_number,
		    const struct file_extent *extent)
{
	struct key key = { inode_number, KEY_EXTENT_DATA, extent->offset };
	struct disk_file_extent disk = {
		.generation = htole64(tree->format->generation),
		.ram_bytes = htole64(extent->bytes),
		.compression = extent->compression,
		.type = FILE_EXTENT_REGULAR,
		.disk_bytenr = htole64(extent->disk_bytenr),
		.disk_bytes = htole64(extent->disk_bytes),
		.bytes = htole64(extent->bytes),
	};

	return tree_add(tree, &key, &disk, sizeof(disk));
}

int file_inline_add(struct tree_builder *tree, uint64_t inode_number, const void *data,
		    size_t bytes, size_t ram_bytes, uint8_t compression)
{
	/* The data take the place of the fields that say where a regular extent is. */
	const size_t header_bytes = offsetof(struct disk_file_extent, disk_bytenr);
	struct key key = { inode_number, KEY_EXTENT_DATA, 0 };
	struct disk_file_extent disk = {
		.generation = htole64(tree->format->generation),
		.ram_bytes = htole64(ram_bytes),
		.compression = compression,
		.type = FILE_EXTENT_INLINE,
	};
	uint8_t item[offsetof(struct disk_file_extent, disk_bytenr) + SECTOR_BYTES];

	if (!bytes || bytes > SECTOR_BYTES)
		return -EINVAL;
	memcpy(item, &disk, header_bytes);
	memcpy(item + header_bytes, data, bytes);
	return tree_add(tree, &key, item, header_bytes + bytes);
}
