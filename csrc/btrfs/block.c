/* SPDX-License-Identifier: MIT */
#include "btrfs/block.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/cleanup.h"
#include "base/fileio.h"

static const struct {
	uint64_t objectid;
	const char *name;
} tree_names[] = {
	{ TREE_ROOT, "root tree" },
	{ TREE_EXTENT, "extent tree" },
	{ TREE_CHUNK, "chunk tree" },
	{ TREE_DEV, "device tree" },
	{ TREE_FS, "file tree" },
	{ TREE_CSUM, "checksum tree" },
	{ 8, "quota tree" }, /* BTRFS_QUOTA_TREE_OBJECTID */
	{ TREE_UUID, "UUID tree" },
	{ TREE_FREE_SPACE, "free-space tree" },
	{ TREE_BLOCK_GROUP, "block-group tree" },
	{ TREE_DATA_RELOC, "data relocation tree" },
};

const char *tree_name(uint64_t objectid, char text[static TREE_NAME_BYTES])
{
	for (size_t i = 0; i < sizeof(tree_names) / sizeof(tree_names[0]); i++) {
		if (tree_names[i].objectid == objectid)
			return tree_names[i].name;
	}
	snprintf(text, TREE_NAME_BYTES,
		 tree_holds_files(objectid) ? "tree of subvolume %" PRIu64 : "tree %" PRIu64,
		 objectid);
	return text;
}

static const struct {
	uint8_t type;
	const char *name;
} key_names[] = {
	{ KEY_INODE_ITEM, "INODE_ITEM" },
	{ KEY_INODE_REF, "INODE_REF" },
	{ KEY_XATTR_ITEM, "XATTR_ITEM" },
	{ KEY_DIR_ITEM, "DIR_ITEM" },
	{ KEY_DIR_INDEX, "DIR_INDEX" },
	{ KEY_EXTENT_DATA, "EXTENT_DATA" },
	{ KEY_EXTENT_CSUM, "EXTENT_CSUM" },
	{ KEY_ROOT_ITEM, "ROOT_ITEM" },
	{ KEY_ROOT_BACKREF, "ROOT_BACKREF" },
	{ KEY_ROOT_REF, "ROOT_REF" },
	{ KEY_EXTENT_ITEM, "EXTENT_ITEM" },
	{ KEY_METADATA_ITEM, "METADATA_ITEM" },
	{ KEY_TREE_BLOCK_REF, "TREE_BLOCK_REF" },
	{ KEY_EXTENT_DATA_REF, "EXTENT_DATA_REF" },
	{ KEY_SHARED_BLOCK_REF, "SHARED_BLOCK_REF" },
	{ KEY_SHARED_DATA_REF, "SHARED_DATA_REF" },
	{ KEY_BLOCK_GROUP_ITEM, "BLOCK_GROUP_ITEM" },
	{ KEY_FREE_SPACE_INFO, "FREE_SPACE_INFO" },
	{ KEY_FREE_SPACE_EXTENT, "FREE_SPACE_EXTENT" },
	{ KEY_FREE_SPACE_BITMAP, "FREE_SPACE_BITMAP" },
	{ KEY_DEV_EXTENT, "DEV_EXTENT" },
	{ KEY_DEV_ITEM, "DEV_ITEM" },
	{ KEY_CHUNK_ITEM, "CHUNK_ITEM" },
	{ KEY_UUID_SUBVOL, "UUID_KEY_SUBVOL" },
};

const char *key_text(const struct key *key, char text[static KEY_TEXT_BYTES])
{
	for (size_t i = 0; i < sizeof(key_names) / sizeof(key_names[0]); i++) {
		if (key_names[i].type == key->type) {
			snprintf(text, KEY_TEXT_BYTES, "(%" PRIu64 " %s %" PRIu64 ")",
				 key->objectid, key_names[i].name, key->offset);
			return text;
		}
	}
	snprintf(text, KEY_TEXT_BYTES, "(%" PRIu64 " %u %" PRIu64 ")", key->objectid, key->type,
		 key->offset);
	return text;
}

const char *block_name(const struct block_expect *expect, char text[static BLOCK_NAME_BYTES])
{
	char name[TREE_NAME_BYTES];

	snprintf(text, BLOCK_NAME_BYTES, "%s, %s at %" PRIu64, tree_name(expect->tree, name),
		 expect->level ? "node" : "leaf", expect->bytenr);
	return text;
}

static const struct disk_key_ptr *node_pointer(const void *node, uint32_t slot)
{
	return (const struct disk_key_ptr *)((const struct disk_header *)node + 1) + slot;
}

static const struct disk_item *leaf_item(const void *leaf, uint32_t slot)
{
	return (const struct disk_item *)((const struct disk_header *)leaf + 1) + slot;
}

struct key block_key(const void *block, uint32_t slot)
{
	if (((const struct disk_header *)block)->level)
		return key_from_disk(&node_pointer(block, slot)->key);
	return key_from_disk(&leaf_item(block, slot)->key);
}

struct block_expect block_child(const struct block_expect *expect, const void *node, uint32_t slot)
{
	const struct disk_key_ptr *pointer = node_pointer(node, slot);
	bool is_last = slot + 1 == block_count(node);

	return (struct block_expect){
		.tree = expect->tree,
		.bytenr = le64toh(pointer->bytenr),
		.generation = le64toh(pointer->generation),
		.level = expect->level - 1,
		.has_first_key = true,
		.first_key = key_from_disk(&pointer->key),
		.has_end_key = !is_last || expect->has_end_key,
		.end_key = is_last ? expect->end_key : block_key(node, slot + 1),
	};
}

/* Subvolumes may share a block, whose owner stays the one that it was made for. */
static bool owner_matches(uint64_t tree, uint64_t owner)
{
	return owner == tree || (tree_holds_files(tree) && tree_holds_files(owner));
}

static int verify_header(struct reader *reader, const struct block_expect *expect,
			 const char *where, const void *block)
{
	const struct disk_header *header = block;
	uint64_t generation = le64toh(header->generation);

	if (!csum_block_matches(reader->csum, block, reader->node_bytes))
		return reader_fail(reader, -EUCLEAN, "%s: the checksum is wrong", where);
	if (le64toh(header->bytenr) != expect->bytenr)
		return reader_fail(reader, -EUCLEAN, "%s: its header says %" PRIu64, where,
				   le64toh(header->bytenr));
	if (memcmp(header->fsid, reader->block_fsid, UUID_BYTES) != 0)
		return reader_fail(reader, -EUCLEAN, "%s: its fsid is not that of the file system",
				   where);
	if (reader->has_chunk_tree_uuid &&
	    memcmp(header->chunk_tree_uuid, reader->chunk_tree_uuid, UUID_BYTES) != 0)
		return reader_fail(reader, -EUCLEAN,
				   "%s: its chunk tree UUID is not that of the chunk tree", where);
	if (header->level != expect->level)
		return reader_fail(reader, -EUCLEAN, "%s: its level is %u, not %u", where,
				   header->level, expect->level);
	if (generation != expect->generation || generation > reader->generation)
		return reader_fail(reader, -EUCLEAN,
				   "%s: its generation is %" PRIu64 ", the pointer to it says "
				   "%" PRIu64 ", the superblock %" PRIu64,
				   where, generation, expect->generation, reader->generation);
	if (!owner_matches(expect->tree, le64toh(header->owner)))
		return reader_fail(reader, -EUCLEAN, "%s: its owner is tree %" PRIu64, where,
				   le64toh(header->owner));
	return 0;
}

static int verify_keys(struct reader *reader, const struct block_expect *expect, const char *where,
		       const void *block)
{
	char text[KEY_TEXT_BYTES], other[KEY_TEXT_BYTES];
	uint32_t count = block_count(block);
	struct key last, key;

	if (!count && (expect->level || expect->has_first_key))
		return reader_fail(reader, -EUCLEAN, "%s: it is empty", where);
	for (uint32_t i = 0; i < count; i++, last = key) {
		key = block_key(block, i);
		if (i && key_compare(&key, &last) <= 0)
			return reader_fail(reader, -EUCLEAN,
					   "%s, item %" PRIu32 ": key %s does not follow %s", where,
					   i, key_text(&key, text), key_text(&last, other));
		if (!i && expect->has_first_key && key_compare(&key, &expect->first_key) != 0)
			return reader_fail(reader, -EUCLEAN,
					   "%s: its first key is %s, the pointer to it says %s",
					   where, key_text(&key, text),
					   key_text(&expect->first_key, other));
		if (expect->has_end_key && key_compare(&key, &expect->end_key) >= 0)
			return reader_fail(reader, -EUCLEAN,
					   "%s, item %" PRIu32 ": key %s belongs behind the block, "
					   "whose successor begins with %s",
					   where, i, key_text(&key, text),
					   key_text(&expect->end_key, other));
	}
	return 0;
}

static int verify_leaf(struct reader *reader, const char *where, const void *leaf)
{
	uint32_t data_bytes = reader->node_bytes - sizeof(struct disk_header);
	uint64_t end = data_bytes;
	uint32_t count = block_count(leaf);

	for (uint32_t i = 0; i < count; i++) {
		const struct disk_item *item = leaf_item(leaf, i);
		uint64_t offset = le32toh(item->offset), size = le32toh(item->size);
		const char *problem = NULL;

		if (offset + size > data_bytes)
			problem = "data ends beyond the block";
		else if (offset + size > end)
			problem = "data overlaps that of the item before";
		else if (offset + size < end)
			problem = "data leaves a gap to that of the item before";
		else if (offset < (uint64_t)count * sizeof(*item))
			problem = "data overlaps the list of items";
		if (problem)
			return reader_fail(reader, -EUCLEAN,
					   "%s, item %" PRIu32 ": %s (offset %" PRIu64
					   ", size %" PRIu64 ")",
					   where, i, problem, offset, size);
		end = offset;
	}
	return 0;
}

static int verify_node(struct reader *reader, const char *where, const void *node)
{
	for (uint32_t i = 0; i < block_count(node); i++) {
		const struct disk_key_ptr *pointer = node_pointer(node, i);

		if (!pointer->bytenr || le64toh(pointer->bytenr) % SECTOR_BYTES)
			return reader_fail(reader, -EUCLEAN,
					   "%s, pointer %" PRIu32 ": %" PRIu64
					   " is not the address of a block",
					   where, i, le64toh(pointer->bytenr));
	}
	return 0;
}

int block_verify(struct reader *reader, const struct block_expect *expect, const void *block)
{
	size_t entry_bytes = expect->level ? sizeof(struct disk_key_ptr) : sizeof(struct disk_item);
	size_t capacity = (reader->node_bytes - sizeof(struct disk_header)) / entry_bytes;
	char where[BLOCK_NAME_BYTES];
	int ret;

	block_name(expect, where);
	ret = verify_header(reader, expect, where, block);
	if (ret)
		return ret;
	if (block_count(block) > capacity)
		return reader_fail(reader, -EUCLEAN,
				   "%s: it claims %" PRIu32 " items, which is more than fit", where,
				   block_count(block));
	ret = verify_keys(reader, expect, where, block);
	if (ret)
		return ret;
	return expect->level ? verify_node(reader, where, block) :
			       verify_leaf(reader, where, block);
}

/* Returns the chunk of a tree block, or NULL with a reason. */
static const struct chunk *map_block(struct reader *reader, const char *where, uint64_t bytenr)
{
	const struct chunk *chunk = chunk_find(&reader->chunks, bytenr, reader->node_bytes);

	if (bytenr % SECTOR_BYTES)
		reader_fail(reader, -EUCLEAN, "%s: the address is not a multiple of %d", where,
			    SECTOR_BYTES);
	else if (!chunk)
		reader_fail(reader, -EUCLEAN, "%s: the address is in no chunk", where);
	else if (!(chunk->type & (CHUNK_SYSTEM | CHUNK_METADATA)))
		reader_fail(reader, -EUCLEAN, "%s: the chunk at %" PRIu64 " is not for metadata",
			    where, chunk->logical);
	else
		return chunk;
	return NULL;
}

static uint64_t copy_offset(const struct chunk *chunk, unsigned copy, uint64_t bytenr)
{
	return chunk->stripes[copy] + (bytenr - chunk->logical);
}

int reader_read_block(struct reader *reader, const struct block_expect *expect, void *block)
{
	char where[BLOCK_NAME_BYTES];
	const struct chunk *chunk;
	int ret;

	block_name(expect, where);
	chunk = map_block(reader, where, expect->bytenr);
	if (!chunk)
		return -EUCLEAN;
	ret = reader_pread(reader, where, block, reader->node_bytes,
			   copy_offset(chunk, 0, expect->bytenr));
	return ret ?: block_verify(reader, expect, block);
}

int reader_write_block(struct reader *reader, int fd, uint64_t bytenr, void *block)
{
	const struct disk_header *header = block;
	struct block_expect expect = {
		.tree = le64toh(header->owner),
		.bytenr = bytenr,
		.level = header->level,
	};
	char where[BLOCK_NAME_BYTES];
	const struct chunk *chunk;

	block_name(&expect, where);
	if (le64toh(header->bytenr) != bytenr)
		return reader_fail(reader, -EINVAL, "%s: its header says %" PRIu64, where,
				   le64toh(header->bytenr));
	chunk = map_block(reader, where, bytenr);
	if (!chunk)
		return -EINVAL;
	csum_block_set(reader->csum, block, reader->node_bytes);
	for (unsigned i = 0; i < chunk->stripe_count; i++) {
		uint64_t offset = copy_offset(chunk, i, bytenr);
		int ret = pwrite_full(fd, block, reader->node_bytes, offset);

		if (ret)
			return reader_fail(reader, ret, "%s: cannot write at %" PRIu64 ": %s",
					   where, offset, strerror(-ret));
	}
	return 0;
}
