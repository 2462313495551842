/* SPDX-License-Identifier: MIT */
/* Checks that device, device extents, chunks and block groups agree with each other. */
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/cleanup.h"
#include "btrfs/check/internal.h"

/* The kernel refuses chunks whose number of 64 KiB stripes does not fit in 32 bits. */
#define KERNEL_CHUNK_BYTES_MAX ((uint64_t)UINT32_MAX * STRIPE_LEN)

static void check_device_item(struct check *check, const struct disk_device *item)
{
	const struct disk_device *super = &check->reader->super.device;
	struct report *report = check->report;

	if (memcmp(item->uuid, super->uuid, UUID_BYTES) != 0)
		report_add(report, RULE_DEVICE,
			   "chunk tree: the device's UUID is not that in the superblock");
	if (memcmp(item->fsid, super->fsid, UUID_BYTES) != 0 ||
	    memcmp(super->fsid, check->reader->block_fsid, UUID_BYTES) != 0)
		report_add(report, RULE_DEVICE,
			   "chunk tree: the device's fsid is not that of the file system");
	if (item->total_bytes != super->total_bytes ||
	    item->total_bytes != check->reader->super.total_bytes)
		report_add(report, RULE_DEVICE,
			   "chunk tree: the device has %" PRIu64 " bytes, by the superblock "
			   "%" PRIu64 " of %" PRIu64,
			   le64toh(item->total_bytes), le64toh(super->total_bytes),
			   le64toh(check->reader->super.total_bytes));
	if (item->bytes_used != super->bytes_used)
		report_add(report, RULE_DEVICE,
			   "chunk tree: %" PRIu64 " bytes of the device are in use, by the "
			   "superblock %" PRIu64,
			   le64toh(item->bytes_used), le64toh(super->bytes_used));
}

static int check_device(struct check *check, uint64_t extent_bytes)
{
	_cleanup_(cursor_close) struct cursor cursor = { 0 };
	struct key key = { OBJECT_DEV_ITEMS, KEY_DEV_ITEM, check->reader->devid };
	struct disk_device item;
	struct block_expect root;
	int ret;

	tree_root_of_super(check->reader, TREE_CHUNK, &root);
	cursor_init(&cursor, check->reader, &root);
	ret = cursor_find(&cursor, &key);
	if (!ret)
		ret = cursor_copy(&cursor, &item, sizeof(item));
	if (ret)
		return check_damage(check, RULE_DEVICE, ret);
	check_device_item(check, &item);
	if (le64toh(item.bytes_used) != extent_bytes)
		report_add(check->report, RULE_DEVICE,
			   "chunk tree: %" PRIu64 " bytes of the device are in use, by its "
			   "extents %" PRIu64,
			   le64toh(item.bytes_used), extent_bytes);
	return 0;
}

/* A stripe of a chunk, or its device extent. */
struct stripe {
	uint64_t offset; /* on the device */
	uint64_t length;
	uint64_t chunk; /* logical address */
};

static int compare_stripes(const void *left, const void *right)
{
	const struct stripe *a = left, *b = right;

	return (a->offset > b->offset) - (a->offset < b->offset);
}

static void check_stripe_order(struct check *check, const struct stripe *stripes, size_t count)
{
	for (size_t i = 1; i < count; i++) {
		if (stripes[i - 1].offset + stripes[i - 1].length > stripes[i].offset)
			report_add(check->report, RULE_DEV_EXTENT,
				   "chunk tree: the chunks at %" PRIu64 " and %" PRIu64
				   " overlap on the device, at %" PRIu64,
				   stripes[i - 1].chunk, stripes[i].chunk, stripes[i].offset);
	}
}

/* Checks the device extent at the cursor against the stripes, and marks its stripe as seen. */
static int check_dev_extent(struct check *check, struct cursor *cursor,
			    const struct stripe *stripes, size_t count, bool *seen, uint64_t *bytes)
{
	struct stripe wanted = { .offset = cursor->key.offset };
	struct disk_dev_extent item;
	const struct stripe *found;
	int ret = cursor_copy(cursor, &item, sizeof(item));

	if (ret)
		return check_damage(check, RULE_DEV_EXTENT, ret);
	*bytes += le64toh(item.length);
	found = count ? bsearch(&wanted, stripes, count, sizeof(wanted), compare_stripes) : NULL;
	if (cursor->key.objectid != check->reader->devid || !found)
		ret = cursor_fail(cursor, "no chunk has a stripe there");
	else if (le64toh(item.chunk_offset) != found->chunk ||
		 le64toh(item.length) != found->length)
		ret = cursor_fail(cursor,
				  "it is of the chunk at %" PRIu64 " and has %" PRIu64
				  " bytes, but there are %" PRIu64 " of the chunk at %" PRIu64,
				  le64toh(item.chunk_offset), le64toh(item.length), found->length,
				  found->chunk);
	if (found)
		seen[found - stripes] = true;
	return check_damage(check, RULE_DEV_EXTENT, ret);
}

static int check_dev_extents(struct check *check)
{
	const struct chunk_list *chunks = &check->reader->chunks;
	_cleanup_free_ struct stripe *stripes =
		calloc(chunks->count * CHUNK_STRIPES_MAX + 1, sizeof(*stripes));
	_cleanup_free_ bool *seen = calloc(chunks->count * CHUNK_STRIPES_MAX + 1, sizeof(*seen));
	_cleanup_(cursor_close) struct cursor cursor = { 0 };
	struct block_expect root;
	uint64_t bytes = 0;
	size_t count = 0;
	int ret;

	if (!stripes || !seen)
		return -ENOMEM;
	for (size_t i = 0; i < chunks->count; i++) {
		const struct chunk *chunk = &chunks->chunks[i];

		for (unsigned s = 0; s < chunk->stripe_count; s++)
			stripes[count++] =
				(struct stripe){ chunk->stripes[s], chunk->length, chunk->logical };
	}
	qsort(stripes, count, sizeof(*stripes), compare_stripes);
	check_stripe_order(check, stripes, count);

	ret = tree_root_find(check->reader, TREE_DEV, &root);
	if (ret)
		return check_damage(check, RULE_TREE, ret);
	cursor_init(&cursor, check->reader, &root);
	for (ret = cursor_first(&cursor); ret > 0; ret = cursor_next(&cursor)) {
		if (cursor.key.type != KEY_DEV_EXTENT)
			continue;
		ret = check_dev_extent(check, &cursor, stripes, count, seen, &bytes);
		if (ret)
			return ret;
	}
	if (ret < 0)
		return check_damage(check, RULE_TREE, ret);
	for (size_t i = 0; i < count; i++) {
		if (!seen[i])
			report_add(check->report, RULE_DEV_EXTENT,
				   "device tree: there is no extent at %" PRIu64
				   " for the chunk at %" PRIu64,
				   stripes[i].offset, stripes[i].chunk);
	}
	return check_device(check, bytes);
}

/* Returns how much of the chunk its extents use. Moves `*next` behind the last of them. */
static uint64_t used_bytes(const struct check *check, const struct chunk *chunk, size_t *next)
{
	uint64_t used = 0;

	while (*next < check->used_count && check->used[*next].start < chunk->logical)
		++*next;
	for (;
	     *next < check->used_count && check->used[*next].start - chunk->logical < chunk->length;
	     ++*next)
		used += check->used[*next].length;
	return used;
}

struct group_pass {
	struct check *check;
	size_t chunk;	  /* the next one that has no block group yet */
	size_t next_used; /* for used_bytes */
	uint64_t used;	  /* sum of the block groups' usage */
};

static void missing_group(struct group_pass *pass)
{
	const struct chunk_list *chunks = &pass->check->reader->chunks;

	report_add(pass->check->report, RULE_BLOCK_GROUP,
		   "chunk tree: the chunk at %" PRIu64 " has no block group",
		   chunks->chunks[pass->chunk++].logical);
}

static int check_group(struct group_pass *pass, struct cursor *cursor)
{
	struct check *check = pass->check;
	const struct chunk_list *chunks = &check->reader->chunks;
	const struct chunk *chunk;
	struct disk_block_group item;
	uint64_t used;
	int ret = cursor_copy(cursor, &item, sizeof(item));

	if (ret)
		return check_damage(check, RULE_BLOCK_GROUP, ret);
	pass->used += le64toh(item.used);
	while (pass->chunk < chunks->count &&
	       chunks->chunks[pass->chunk].logical < cursor->key.objectid)
		missing_group(pass);
	if (pass->chunk == chunks->count ||
	    chunks->chunks[pass->chunk].logical != cursor->key.objectid)
		return check_damage(check, RULE_BLOCK_GROUP,
				    cursor_fail(cursor, "no chunk is there"));
	chunk = &chunks->chunks[pass->chunk++];
	if (cursor->key.offset != chunk->length || le64toh(item.flags) != chunk->type ||
	    le64toh(item.chunk_objectid) != OBJECT_FIRST_CHUNK) {
		cursor_fail(cursor,
			    "length, type 0x%" PRIx64 " and chunk tree %" PRIu64
			    " are not those of the chunk: %" PRIu64 ", 0x%" PRIx64 ", %d",
			    le64toh(item.flags), le64toh(item.chunk_objectid), chunk->length,
			    chunk->type, OBJECT_FIRST_CHUNK);
		report_add(check->report, RULE_BLOCK_GROUP, "%s", check->reader->error);
	}
	used = used_bytes(check, chunk, &pass->next_used);
	if (check->used_known && used != le64toh(item.used)) {
		cursor_fail(cursor,
			    "%" PRIu64 " bytes are said to be in use, by the extents %" PRIu64,
			    le64toh(item.used), used);
		report_add(check->report, RULE_USAGE, "%s", check->reader->error);
	}
	return 0;
}

static int check_block_groups(struct check *check)
{
	bool own_tree = le64toh(check->reader->super.compat_ro_flags) & COMPAT_RO_BLOCK_GROUP_TREE;
	_cleanup_(cursor_close) struct cursor cursor = { 0 };
	struct group_pass pass = { .check = check };
	struct block_expect root;
	int ret = tree_root_find(check->reader, own_tree ? TREE_BLOCK_GROUP : TREE_EXTENT, &root);

	if (ret)
		return check_damage(check, RULE_TREE, ret);
	cursor_init(&cursor, check->reader, &root);
	for (ret = cursor_first(&cursor); ret > 0; ret = cursor_next(&cursor)) {
		if (cursor.key.type != KEY_BLOCK_GROUP_ITEM)
			continue;
		ret = check_group(&pass, &cursor);
		if (ret)
			return ret;
	}
	if (ret < 0)
		return check_damage(check, RULE_TREE, ret);
	while (pass.chunk < check->reader->chunks.count)
		missing_group(&pass);
	if (pass.used != le64toh(check->reader->super.bytes_used))
		report_add(check->report, RULE_BYTES_USED,
			   "superblock: bytes_used is %" PRIu64 ", by the block groups %" PRIu64,
			   le64toh(check->reader->super.bytes_used), pass.used);
	return 0;
}

int check_space(struct check *check)
{
	const struct chunk_list *chunks = &check->reader->chunks;
	int ret;

	for (size_t i = 0; i < chunks->count; i++) {
		if (chunks->chunks[i].length >= KERNEL_CHUNK_BYTES_MAX)
			report_add(check->report, RULE_CHUNK_LENGTH,
				   "chunk tree: the chunk at %" PRIu64 " has %" PRIu64
				   " bytes; kernels since 6.4 refuse %" PRIu64 " or more",
				   chunks->chunks[i].logical, chunks->chunks[i].length,
				   KERNEL_CHUNK_BYTES_MAX);
	}
	ret = check_dev_extents(check);
	return ret ?: check_block_groups(check);
}
