/* SPDX-License-Identifier: MIT */
/*
 * Reads the extent tree: which extents are in use, and their back references. Sources: struct
 * btrfs_extent_item, btrfs_extent_inline_ref; check_extent_item in the kernel's tree-checker.c.
 */
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/array.h"
#include "base/cleanup.h"
#include "btrfs/check/internal.h"

/* struct btrfs_tree_block_info: key and level, of blocks in file systems without skinny metadata */
enum { TREE_BLOCK_INFO_BYTES = sizeof(struct disk_key) + 1 };
enum { KEY_EXTENT_OWNER_REF = 172 }; /* simple quotas: which tree made it; not a reference */

int ref_list_add(struct ref_list *list, const struct ref *ref)
{
	if (array_reserve(list->refs, list->capacity, list->count + 1))
		return -ENOMEM;
	list->refs[list->count++] = *ref;
	return 0;
}

const struct used *check_find_used(const struct check *check, uint64_t start)
{
	size_t low = 0, high = check->used_count;

	while (low < high) {
		size_t middle = (low + high) / 2;

		if (check->used[middle].start < start)
			low = middle + 1;
		else
			high = middle;
	}
	return low < check->used_count && check->used[low].start == start ? &check->used[low] :
									    NULL;
}

static int add_used(struct check *check, const struct used *used)
{
	if (array_reserve(check->used, check->used_capacity, check->used_count + 1))
		return -ENOMEM;
	check->used[check->used_count++] = *used;
	return 0;
}

/* Returns the size of a reference without its type byte, or 0 for an unknown type. */
static size_t ref_bytes(uint8_t type)
{
	switch (type) {
	case KEY_TREE_BLOCK_REF:
	case KEY_SHARED_BLOCK_REF:
	case KEY_EXTENT_OWNER_REF:
		return sizeof(le64);
	case KEY_EXTENT_DATA_REF:
		return sizeof(struct disk_data_ref) - 1;
	case KEY_SHARED_DATA_REF:
		return sizeof(le64) + sizeof(le32);
	default:
		return 0;
	}
}

static uint64_t get64(const uint8_t *data)
{
	le64 value;

	memcpy(&value, data, sizeof(value));
	return le64toh(value);
}

static uint32_t get32(const uint8_t *data)
{
	le32 value;

	memcpy(&value, data, sizeof(value));
	return le32toh(value);
}

/* `data` has ref_bytes(type) bytes. */
static struct ref parse_ref(uint8_t type, const uint8_t *data)
{
	struct ref ref = { .type = type, .count = 1 };
	struct disk_data_ref disk;

	switch (type) {
	case KEY_EXTENT_DATA_REF:
		memcpy((uint8_t *)&disk + 1, data, sizeof(disk) - 1);
		ref.origin = le64toh(disk.root);
		ref.objectid = le64toh(disk.objectid);
		ref.offset = le64toh(disk.offset);
		ref.count = le32toh(disk.count);
		break;
	case KEY_SHARED_DATA_REF:
		ref.origin = get64(data);
		ref.count = get32(data + sizeof(le64));
		break;
	default:
		ref.origin = get64(data);
		break;
	}
	return ref;
}

static bool ref_is_of_data(uint8_t type)
{
	return type == KEY_EXTENT_DATA_REF || type == KEY_SHARED_DATA_REF;
}

/* Adds a back reference to the extent that was read last, or fails with what is wrong. */
static int add_told(struct check *check, struct cursor *cursor, struct ref ref)
{
	const struct used *extent = check->used_count ? &check->used[check->used_count - 1] : NULL;

	if (!extent || extent->start != cursor->key.objectid)
		return cursor_fail(cursor, "a reference without an extent");
	if (ref_is_of_data(ref.type) != !!(extent->flags & EXTENT_DATA_FLAG))
		return cursor_fail(
			cursor, "a reference of type %u does not go with extent flags 0x%" PRIx64,
			ref.type, extent->flags);
	if (!ref.count)
		return cursor_fail(cursor, "a reference with a count of 0");
	ref.start = extent->start;
	ref.level = extent->level;
	return ref_list_add(&check->told, &ref);
}

static int read_inline_refs(struct check *check, struct cursor *cursor, size_t at)
{
	while (at < cursor->size) {
		uint8_t type = cursor->data[at++];
		size_t bytes = ref_bytes(type);
		int ret;

		if (!bytes)
			return cursor_fail(cursor, "no reference has type %u", type);
		if (bytes > cursor->size - at)
			return cursor_fail(cursor, "the last reference is cut off");
		if (type != KEY_EXTENT_OWNER_REF) {
			ret = add_told(check, cursor, parse_ref(type, cursor->data + at));
			if (ret)
				return ret;
		}
		at += bytes;
	}
	return 0;
}

/* Checks that the extent is in a chunk of its kind, and behind the extent before it. */
static int check_place(struct check *check, struct cursor *cursor, const struct used *used)
{
	const struct used *last = check->used_count ? &check->used[check->used_count - 1] : NULL;
	const struct chunk *chunk = chunk_find(&check->reader->chunks, used->start, used->length);
	uint64_t types = used->flags & EXTENT_DATA_FLAG ? CHUNK_DATA :
							  CHUNK_METADATA | CHUNK_SYSTEM;

	if (!used->length || (used->start | used->length) % SECTOR_BYTES)
		return cursor_fail(cursor, "its address or length is not a multiple of %d",
				   SECTOR_BYTES);
	if (!chunk)
		return cursor_fail(cursor, "%" PRIu64 " bytes at %" PRIu64 " are not in one chunk",
				   used->length, used->start);
	if (!(chunk->type & types))
		return cursor_fail(cursor, "the chunk at %" PRIu64 " is of type 0x%" PRIx64,
				   chunk->logical, chunk->type);
	if (last && last->start + last->length > used->start)
		return cursor_fail(cursor,
				   "it overlaps the extent at %" PRIu64 ", of %" PRIu64 " bytes",
				   last->start, last->length);
	return 0;
}

static int read_extent(struct check *check, struct cursor *cursor)
{
	bool is_skinny = cursor->key.type == KEY_METADATA_ITEM;
	struct disk_extent extent;
	size_t at = sizeof(extent);
	struct used used;
	int ret = cursor_copy(cursor, &extent, sizeof(extent));

	if (ret)
		return ret;
	used = (struct used){
		.start = cursor->key.objectid,
		.length = is_skinny ? check->reader->node_bytes : cursor->key.offset,
		.refs = le64toh(extent.refs),
		.flags = le64toh(extent.flags),
		.level = is_skinny ? (uint8_t)cursor->key.offset : 0,
	};
	switch (used.flags & (EXTENT_DATA_FLAG | EXTENT_TREE_BLOCK_FLAG)) {
	case EXTENT_DATA_FLAG:
		if (is_skinny)
			return cursor_fail(cursor, "it has the flag of a data extent");
		break;
	case EXTENT_TREE_BLOCK_FLAG:
		if (used.length != check->reader->node_bytes)
			return cursor_fail(cursor, "a tree block has no %" PRIu64 " bytes",
					   used.length);
		if (is_skinny)
			break;
		if (cursor->size < at + TREE_BLOCK_INFO_BYTES)
			return cursor_fail(cursor, "it ends within struct btrfs_tree_block_info");
		used.level = cursor->data[at + sizeof(struct disk_key)];
		at += TREE_BLOCK_INFO_BYTES;
		break;
	default:
		return cursor_fail(cursor, "flags 0x%" PRIx64 " are of no kind of extent",
				   used.flags);
	}
	ret = check_place(check, cursor, &used);
	if (!ret)
		ret = add_used(check, &used);
	return ret ?: read_inline_refs(check, cursor, at);
}

static int read_item(struct check *check, struct cursor *cursor)
{
	uint8_t type = cursor->key.type;
	uint8_t data[sizeof(struct disk_data_ref)] = { 0 };
	le64 origin = htole64(cursor->key.offset);
	size_t bytes = ref_bytes(type);

	if (type == KEY_EXTENT_ITEM || type == KEY_METADATA_ITEM)
		return read_extent(check, cursor);
	if (!bytes || type == KEY_EXTENT_OWNER_REF)
		return 0;
	/* This item is one reference. Except for EXTENT_DATA_REF, its key has the origin. */
	memcpy(data, &origin, sizeof(origin));
	if (type == KEY_EXTENT_DATA_REF || type == KEY_SHARED_DATA_REF) {
		size_t at = type == KEY_SHARED_DATA_REF ? sizeof(origin) : 0;

		if (cursor->size < bytes - at)
			return cursor_fail(cursor, "it is cut off");
		memcpy(data + at, cursor->data, bytes - at);
	}
	return add_told(check, cursor, parse_ref(type, data));
}

int check_read_extents(struct check *check)
{
	_cleanup_(cursor_close) struct cursor cursor = { 0 };
	struct block_expect root;
	int ret = tree_root_find(check->reader, TREE_EXTENT, &root);

	if (ret)
		return check_damage(check, RULE_TREE, ret);
	cursor_init(&cursor, check->reader, &root);
	check->used_known = true;
	for (ret = cursor_first(&cursor); ret > 0; ret = cursor_next(&cursor)) {
		ret = read_item(check, &cursor);
		if (ret) {
			ret = check_damage(check, RULE_EXTENT, ret);
			check->used_known = false;
		}
		if (ret)
			return ret;
	}
	if (ret < 0) {
		check->used_known = false;
		ret = check_damage(check, RULE_TREE, ret);
	}
	return ret;
}
