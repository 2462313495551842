/* SPDX-License-Identifier: MIT */
#include "btrfs/inode.h"

#include <errno.h>
#include <string.h>

struct disk_time time_make(int64_t seconds)
{
	return (struct disk_time){ .seconds = htole64((uint64_t)seconds) };
}

struct disk_inode inode_make(uint64_t generation, int64_t time, uint32_t mode)
{
	return (struct disk_inode){
		.generation = htole64(generation),
		.transid = htole64(generation),
		.link_count = htole32(1),
		.mode = htole32(mode),
		.accessed = time_make(time),
		.changed = time_make(time),
		.modified = time_make(time),
		.created = time_make(time),
	};
}

int inode_add(struct tree_builder *tree, uint64_t inode_number, const struct disk_inode *inode)
{
	struct key key = { inode_number, KEY_INODE_ITEM, 0 };

	return tree_add(tree, &key, inode, sizeof(*inode));
}

int inode_ref_add(struct tree_builder *tree, uint64_t inode_number, uint64_t parent, uint64_t index,
		  const char *name)
{
	struct key key = { inode_number, KEY_INODE_REF, parent };
	uint8_t item[sizeof(struct disk_inode_ref) + NAME_MAX_BYTES];
	size_t length = strlen(name);
	struct disk_inode_ref ref = {
		.index = htole64(index),
		.name_length = htole16((uint16_t)length),
	};

	if (length > NAME_MAX_BYTES)
		return -ENAMETOOLONG;
	memcpy(item, &ref, sizeof(ref));
	memcpy(item + sizeof(ref), name, length);
	return tree_add(tree, &key, item, sizeof(ref) + length);
}

static int entry_add(struct tree_builder *tree, const struct key *key, const char *name,
		     const struct key *target, uint8_t entry_type)
{
	uint8_t item[sizeof(struct disk_dir_item) + NAME_MAX_BYTES];
	size_t length = strlen(name);
	struct disk_dir_item entry = {
		.location = key_to_disk(target),
		.transid = htole64(tree->format->generation),
		.name_length = htole16((uint16_t)length),
		.type = entry_type,
	};

	if (length > NAME_MAX_BYTES)
		return -ENAMETOOLONG;
	memcpy(item, &entry, sizeof(entry));
	memcpy(item + sizeof(entry), name, length);
	return tree_add(tree, key, item, sizeof(entry) + length);
}

uint64_t dir_name_hash(const char *name, size_t length)
{
	return crc32c_raw(~1u, name, length);
}

int dir_item_add(struct tree_builder *tree, uint64_t parent, const char *name,
		 const struct key *target, uint8_t entry_type)
{
	struct key key = { parent, KEY_DIR_ITEM, dir_name_hash(name, strlen(name)) };

	return entry_add(tree, &key, name, target, entry_type);
}

int dir_index_add(struct tree_builder *tree, uint64_t parent, uint64_t index, const char *name,
		  const struct key *target, uint8_t entry_type)
{
	struct key key = { parent, KEY_DIR_INDEX, index };

	return entry_add(tree, &key, name, target, entry_type);
}

int file_extent_add(struct tree_builder *tree, uint64_t inode_number, uint64_t file_offset,
		    uint64_t disk_bytenr, uint64_t bytes)
{
	struct key key = { inode_number, KEY_EXTENT_DATA, file_offset };
	struct disk_file_extent extent = {
		.generation = htole64(tree->format->generation),
		.ram_bytes = htole64(bytes),
		.type = FILE_EXTENT_REGULAR,
		.disk_bytenr = htole64(disk_bytenr),
		.disk_bytes = htole64(bytes),
		.bytes = htole64(bytes),
	};

	return tree_add(tree, &key, &extent, sizeof(extent));
}
