/* SPDX-License-Identifier: MIT */
/* Checks the file of virtual data, and the layout that a seed of our strategies has. */
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "base/cleanup.h"
#include "btrfs/check/internal.h"
#include "btrfs/inode.h"
#include "btrfs/seed.h"
#include "btrfs/super.h"

/* struct btrfs_csum_item's key: the checksums of the data from `offset` on. */
#define CSUM_OBJECTID ((uint64_t)-10) /* BTRFS_EXTENT_CSUM_OBJECTID */

static void check_inode(struct check *check)
{
	const struct virtual_file *file = &check->layout->file;
	const struct disk_inode *inode = &file->inode;
	struct report *report = check->report;

	if (!(le64toh(inode->flags) & INODE_IMMUTABLE))
		report_add(report, RULE_FILE,
			   "file tree, inode %" PRIu64 ": IMMUTABLE is not set in flags 0x%" PRIx64
			   ", so that it can be removed",
			   file->inode_number, le64toh(inode->flags));
	if (le32toh(inode->link_count) != 1)
		report_add(report, RULE_FILE,
			   "file tree, inode %" PRIu64 ": it has %" PRIu32 " links, not 1",
			   file->inode_number, le32toh(inode->link_count));
	if (le64toh(inode->byte_count) != file->data_bytes)
		report_add(report, RULE_FILE,
			   "file tree, inode %" PRIu64 ": nbytes is %" PRIu64
			   ", by the extents %" PRIu64,
			   file->inode_number, le64toh(inode->byte_count), file->data_bytes);
	if (file->parent != OBJECT_FIRST_FREE)
		report_add(report, RULE_FILE,
			   "file tree, inode %" PRIu64 ": it is in directory %" PRIu64
			   ", not in the top directory",
			   file->inode_number, file->parent);
}

/* Checks that an entry of the directory has the file's name, and leads to it. */
static int check_entry(struct check *check, struct cursor *cursor, const struct key *key)
{
	const struct virtual_file *file = &check->layout->file;
	struct disk_dir_item entry;
	size_t length = strlen(file->name);
	int ret = cursor_find(cursor, key);

	if (!ret)
		ret = cursor_copy(cursor, &entry, sizeof(entry));
	if (!ret &&
	    (le16toh(entry.name_length) != length || length > cursor->size - sizeof(entry) ||
	     memcmp(cursor->data + sizeof(entry), file->name, length) != 0 ||
	     le64toh(entry.location.objectid) != file->inode_number ||
	     entry.location.type != KEY_INODE_ITEM || entry.type != ENTRY_FILE))
		ret = cursor_fail(cursor, "it does not lead to inode %" PRIu64, file->inode_number);
	return ret ? check_damage(check, RULE_FILE, ret) : 0;
}

static int check_name(struct check *check, struct cursor *cursor)
{
	const struct virtual_file *file = &check->layout->file;
	struct key by_hash = { file->parent, KEY_DIR_ITEM,
			       dir_name_hash(file->name, strlen(file->name)) };
	struct key by_index = { file->parent, KEY_DIR_INDEX, file->name_index };
	int ret = check_entry(check, cursor, &by_hash);

	return ret ?: check_entry(check, cursor, &by_index);
}

struct extent_pass {
	struct check *check;
	struct cursor *cursor;
	struct cursor *csums; /* in the checksum tree; NULL when it cannot be read */
	uint64_t file_end, logical_end, device_end; /* of the extents so far */
	const struct chunk *chunk;		    /* of the last extent */
	size_t next_chunk;			    /* mega-extent: that of the next extent */
};

static void violation(struct extent_pass *pass, const char *rule, const char *problem)
{
	char where[CURSOR_NAME_BYTES];

	report_add(pass->check->report, rule, "%s: %s", cursor_name(pass->cursor, where), problem);
}

/*
 * Checks that an extent's logical and device addresses follow those of the extents before, and that
 * it leaves the superblocks' places free.
 */
static void check_order(struct extent_pass *pass, const struct chunk *chunk, uint64_t logical,
			uint64_t bytes)
{
	uint64_t device = chunk->stripes[0] + (logical - chunk->logical);
	char where[CURSOR_NAME_BYTES];

	if (logical < pass->logical_end)
		report_add(pass->check->report, RULE_ORDER,
			   "%s: logical address %" PRIu64 " does not follow %" PRIu64,
			   cursor_name(pass->cursor, where), logical, pass->logical_end);
	if (device < pass->device_end)
		report_add(pass->check->report, RULE_ORDER,
			   "%s: device offset %" PRIu64 " does not follow %" PRIu64,
			   cursor_name(pass->cursor, where), device, pass->device_end);
	for (unsigned i = 0; i < SUPER_MIRRORS; i++) {
		uint64_t mirror = super_mirror_offset(i);

		if (device < mirror + SUPER_RESERVED_BYTES && device + bytes > mirror)
			report_add(
				pass->check->report, RULE_SUPER_OVERLAP,
				"%s: at %" PRIu64
				" on the device, it is in the place of the superblock at %" PRIu64,
				cursor_name(pass->cursor, where), device, mirror);
	}
	pass->logical_end = logical + bytes;
	pass->device_end = device + bytes;
}

/* Finds the first chunk of virtual data from `slot` on; returns chunks->count if none is left. */
static size_t virtual_chunk(const struct chunk_list *chunks, size_t slot)
{
	while (slot < chunks->count && (chunks->chunks[slot].logical < SEED_VIRTUAL_START ||
					!(chunks->chunks[slot].type & CHUNK_DATA)))
		slot++;
	return slot;
}

static void empty_chunk(struct extent_pass *pass)
{
	const struct chunk_list *chunks = &pass->check->reader->chunks;

	report_add(pass->check->report, RULE_CHUNK_EXTENT,
		   "chunk tree: the chunk at %" PRIu64 " has no extent of the virtual file",
		   chunks->chunks[pass->next_chunk].logical);
	pass->next_chunk = virtual_chunk(chunks, pass->next_chunk + 1);
}

/* Checks that each chunk has one extent, at its start and where the file offset demands. */
static void check_mega_extent(struct extent_pass *pass, const struct chunk *chunk, uint64_t logical)
{
	const struct chunk_list *chunks = &pass->check->reader->chunks;
	char where[CURSOR_NAME_BYTES];

	if (logical != chunk->logical)
		report_add(pass->check->report, RULE_CHUNK_EXTENT,
			   "%s: it begins at %" PRIu64 ", its chunk at %" PRIu64,
			   cursor_name(pass->cursor, where), logical, chunk->logical);
	if (pass->chunk == chunk)
		report_add(pass->check->report, RULE_CHUNK_EXTENT,
			   "%s: the chunk at %" PRIu64 " has more than one extent",
			   cursor_name(pass->cursor, where), chunk->logical);
	while (pass->next_chunk < chunks->count && &chunks->chunks[pass->next_chunk] < chunk)
		empty_chunk(pass);
	if (pass->next_chunk < chunks->count && &chunks->chunks[pass->next_chunk] == chunk)
		pass->next_chunk = virtual_chunk(chunks, pass->next_chunk + 1);
	if (logical - SEED_VIRTUAL_START != pass->cursor->key.offset)
		report_add(pass->check->report, RULE_MAPPING,
			   "%s: it is at logical address %" PRIu64 ", not at %" PRIu64,
			   cursor_name(pass->cursor, where), logical,
			   SEED_VIRTUAL_START + pass->cursor->key.offset);
}

/* Checks that virtual data have no checksums, as nobody knows the data yet. */
static int check_no_checksum(struct extent_pass *pass, uint64_t logical, uint64_t bytes)
{
	struct key first = { CSUM_OBJECTID, KEY_EXTENT_CSUM, logical };
	int ret = pass->csums ? cursor_seek(pass->csums, &first) : 0;

	if (ret < 0) {
		pass->csums = NULL; /* one report is enough */
		return check_damage(pass->check, RULE_TREE, ret);
	}
	if (ret > 0 && pass->csums->key.objectid == first.objectid &&
	    pass->csums->key.type == first.type && pass->csums->key.offset - logical < bytes) {
		cursor_fail(pass->csums, "virtual data have a checksum");
		report_add(pass->check->report, RULE_FILE_EXTENT, "%s", pass->check->reader->error);
	}
	return 0;
}

static const char *extent_problem(const struct disk_file_extent *extent)
{
	if (extent->type != FILE_EXTENT_REGULAR)
		return extent->type == FILE_EXTENT_PREALLOC ?
			       "it is preallocated, and so reads as zeroes" :
			       "it is not regular";
	if (extent->compression || extent->encryption || extent->other_encoding)
		return "it is compressed or encoded";
	if (!extent->disk_bytenr)
		return "it is a hole";
	if (extent->offset || extent->bytes != extent->disk_bytes ||
	    extent->ram_bytes != extent->disk_bytes)
		return "it is not the whole of an extent";
	return NULL;
}

static int check_extent(struct extent_pass *pass)
{
	struct reader *reader = pass->check->reader;
	struct disk_file_extent extent = { 0 };
	uint64_t bytes, logical, start = pass->cursor->key.offset;
	const struct chunk *chunk;
	const char *problem;
	int ret;

	/* An inline extent may be shorter. It is a violation in any case. */
	memcpy(&extent, pass->cursor->data,
	       pass->cursor->size < sizeof(extent) ? pass->cursor->size : sizeof(extent));
	problem = extent_problem(&extent);
	if (problem)
		violation(pass, RULE_FILE_EXTENT, problem);
	if (start != pass->file_end) {
		cursor_fail(pass->cursor, "the extents before it end at %" PRIu64, pass->file_end);
		report_add(pass->check->report, RULE_COVER, "%s", reader->error);
	}
	ret = cursor_copy(pass->cursor, &extent, sizeof(extent));
	if (ret)
		return check_damage(pass->check, RULE_FILE_EXTENT, ret);
	bytes = le64toh(extent.bytes);
	logical = le64toh(extent.disk_bytenr) + le64toh(extent.offset);
	if (__builtin_add_overflow(start, bytes, &pass->file_end))
		pass->file_end = UINT64_MAX;
	if (!extent.disk_bytenr)
		return 0;
	chunk = chunk_find(&reader->chunks, logical, bytes);
	if (!chunk || !(chunk->type & CHUNK_DATA)) {
		violation(pass, RULE_FILE_EXTENT, "it is not in one data chunk");
		return 0;
	}
	check_order(pass, chunk, logical, bytes);
	if (pass->check->layout->strategy == STRATEGY_MEGA_EXTENT)
		check_mega_extent(pass, chunk, logical);
	pass->chunk = chunk;
	return check_no_checksum(pass, logical, bytes);
}

static int check_extents(struct check *check, struct cursor *cursor)
{
	const struct virtual_file *file = &check->layout->file;
	const struct chunk_list *chunks = &check->reader->chunks;
	struct key first = { file->inode_number, KEY_EXTENT_DATA, 0 };
	struct extent_pass pass = { .check = check, .cursor = cursor };
	_cleanup_(cursor_close) struct cursor csums = { 0 };
	struct block_expect root;
	int ret = tree_root_find(check->reader, TREE_CSUM, &root);

	if (ret) {
		ret = check_damage(check, RULE_TREE, ret);
	} else {
		cursor_init(&csums, check->reader, &root);
		pass.csums = &csums;
	}
	if (ret)
		return ret;
	pass.next_chunk = virtual_chunk(chunks, 0);
	for (ret = cursor_seek(cursor, &first); ret > 0; ret = cursor_next(cursor)) {
		if (cursor->key.objectid != first.objectid || cursor->key.type != first.type)
			break;
		ret = check_extent(&pass);
		if (ret)
			return ret;
	}
	if (ret < 0)
		return check_damage(check, RULE_TREE, ret);
	if (pass.file_end != le64toh(file->inode.size))
		report_add(check->report, RULE_COVER,
			   "file tree, inode %" PRIu64 ": its size is %" PRIu64
			   ", its extents end at %" PRIu64,
			   file->inode_number, le64toh(file->inode.size), pass.file_end);
	while (check->layout->strategy == STRATEGY_MEGA_EXTENT && pass.next_chunk < chunks->count)
		empty_chunk(&pass);
	return 0;
}

/* Logical is physical, and scrub on kernels since 6.12 wants chunks to end on 4 GiB. */
static void check_mega_chunks(struct check *check)
{
	const struct chunk_list *chunks = &check->reader->chunks;

	for (size_t i = 0; i < chunks->count; i++) {
		const struct chunk *chunk = &chunks->chunks[i];

		if (chunk->stripes[0] != chunk->logical)
			report_add(check->report, RULE_MAPPING,
				   "chunk tree: the chunk at %" PRIu64 " is at %" PRIu64
				   " on the device",
				   chunk->logical, chunk->stripes[0]);
		if (chunk->logical >= SEED_VIRTUAL_START && chunk->type & CHUNK_DATA &&
		    chunk->length % SEED_CHUNK_STEP_BYTES)
			report_add(check->report, RULE_CHUNK_LENGTH,
				   "chunk tree: the chunk at %" PRIu64 " has %" PRIu64
				   " bytes, no multiple of 4 GiB",
				   chunk->logical, chunk->length);
	}
}

int check_virtual_file(struct check *check)
{
	_cleanup_(cursor_close) struct cursor cursor = { 0 };
	const struct layout *layout = check->layout;
	struct block_expect root;
	int ret;

	if (layout->strategy == STRATEGY_MEGA_EXTENT)
		check_mega_chunks(check);
	if (!layout->has_file) {
		if (layout->is_seeding || layout->strategy != STRATEGY_OTHER)
			report_add(check->report, RULE_LAYOUT,
				   "file tree: there is no file of virtual data: a regular one "
				   "without checksums (NODATASUM) that has most of the data");
		return 0;
	}
	ret = tree_root_find(check->reader, TREE_FS, &root);
	if (ret)
		return check_damage(check, RULE_TREE, ret);
	cursor_init(&cursor, check->reader, &root);
	check_inode(check);
	ret = check_name(check, &cursor);
	return ret ?: check_extents(check, &cursor);
}
