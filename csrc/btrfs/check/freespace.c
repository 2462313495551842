/* SPDX-License-Identifier: MIT */
/*
 * Checks that the free-space tree lists exactly the space that no extent uses. Each block group
 * has free extents or bitmaps in it (free-space-tree.c in the kernel).
 */
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>

#include "base/cleanup.h"
#include "btrfs/check/internal.h"

enum { FREE_SPACE_USING_BITMAPS = 1 << 0 }; /* BTRFS_FREE_SPACE_USING_BITMAPS */

struct free_pass {
	struct check *check;
	const struct chunk *chunk; /* the block group's; NULL before the first one */
	size_t next_chunk;
	size_t next_used;		/* the first extent that may be in the block group */
	uint64_t position;		/* all free space before it has been found */
	uint64_t run_start, run_length; /* last range from the tree, not yet compared */
	uint32_t told_count, found_count;
	uint64_t stale_start, stale_end; /* of a block group that no longer exists */
	bool bitmaps;
	bool wrong; /* one violation per block group is enough */
};

static void wrong(struct free_pass *pass, const char *what, uint64_t start, uint64_t length)
{
	if (!pass->wrong)
		report_add(pass->check->report, RULE_FREE_SPACE,
			   "free-space tree: block group at %" PRIu64 ": %s: %" PRIu64
			   " bytes at %" PRIu64,
			   pass->chunk->logical, what, length, start);
	pass->wrong = true;
}

/* Finds the next range from `position` on that no extent uses; false: the block group ends. */
static bool next_free(struct free_pass *pass, uint64_t *start, uint64_t *length)
{
	const struct check *check = pass->check;
	uint64_t end = pass->chunk->logical + pass->chunk->length;

	while (pass->position < end) {
		const struct used *used =
			pass->next_used < check->used_count ? &check->used[pass->next_used] : NULL;
		uint64_t stop = used && used->start < end ? used->start : end;

		*start = pass->position;
		pass->position = end;
		if (used && used->start < end) {
			pass->position = used->start + used->length;
			pass->next_used++;
		}
		if (stop > *start) {
			*length = stop - *start;
			return true;
		}
	}
	return false;
}

/* Compares the last range that the tree lists with the next one that no extent uses. */
static void flush_run(struct free_pass *pass)
{
	uint64_t start, length;

	if (!pass->run_length)
		return;
	pass->found_count++;
	if (!next_free(pass, &start, &length) || start != pass->run_start ||
	    length != pass->run_length)
		wrong(pass, "not free, or not to this extent", pass->run_start, pass->run_length);
	pass->run_length = 0;
}

/* Takes a free range from the tree. In bitmaps, one range may continue in the next item. */
static void take_range(struct free_pass *pass, uint64_t start, uint64_t length)
{
	if (pass->bitmaps && pass->run_length && pass->run_start + pass->run_length == start) {
		pass->run_length += length;
		return;
	}
	flush_run(pass);
	pass->run_start = start;
	pass->run_length = length;
}

static void finish_group(struct free_pass *pass)
{
	uint64_t start, length;

	if (!pass->chunk)
		return;
	flush_run(pass);
	if (next_free(pass, &start, &length))
		wrong(pass, "free, but not in the tree", start, length);
	if (pass->told_count != pass->found_count && !pass->wrong)
		report_add(pass->check->report, RULE_FREE_SPACE,
			   "free-space tree: block group at %" PRIu64 ": it says that there are "
			   "%" PRIu32 " free extents, there are %" PRIu32,
			   pass->chunk->logical, pass->told_count, pass->found_count);
	pass->chunk = NULL;
}

static void missing_info(struct free_pass *pass)
{
	const struct chunk_list *chunks = &pass->check->reader->chunks;

	report_add(pass->check->report, RULE_FREE_SPACE,
		   "free-space tree: the block group at %" PRIu64 " is missing",
		   chunks->chunks[pass->next_chunk++].logical);
}

/* mkfs.btrfs, up to 6.2 at least, leaves the items of its temporary block groups behind. */
static int stale_group(struct free_pass *pass, struct cursor *cursor)
{
	const struct key *key = &cursor->key;

	if (pass->check->layout->strategy == STRATEGY_MEGA_EXTENT)
		return cursor_fail(cursor, "no block group is there");
	report_note(pass->check->report,
		    "the free-space tree lists a block group at %" PRIu64
		    " that does not exist: harmless, mkfs.btrfs leaves such",
		    key->objectid);
	pass->stale_start = key->objectid;
	if (__builtin_add_overflow(key->objectid, key->offset, &pass->stale_end))
		pass->stale_end = UINT64_MAX;
	return 0;
}

static int begin_group(struct free_pass *pass, struct cursor *cursor)
{
	struct check *check = pass->check;
	const struct chunk_list *chunks = &check->reader->chunks;
	struct disk_free_space_info info;
	const struct chunk *chunk;
	int ret = cursor_copy(cursor, &info, sizeof(info));

	finish_group(pass);
	if (ret)
		return ret;
	while (pass->next_chunk < chunks->count &&
	       chunks->chunks[pass->next_chunk].logical < cursor->key.objectid)
		missing_info(pass);
	if (pass->next_chunk == chunks->count ||
	    chunks->chunks[pass->next_chunk].logical != cursor->key.objectid)
		return stale_group(pass, cursor);
	chunk = &chunks->chunks[pass->next_chunk++];
	if (cursor->key.offset != chunk->length)
		return cursor_fail(cursor, "the block group has %" PRIu64 " bytes", chunk->length);
	pass->chunk = chunk;
	pass->position = chunk->logical;
	pass->told_count = le32toh(info.extent_count);
	pass->found_count = 0;
	pass->bitmaps = le32toh(info.flags) & FREE_SPACE_USING_BITMAPS;
	pass->wrong = false;
	pass->run_length = 0;
	while (pass->next_used < check->used_count &&
	       check->used[pass->next_used].start < chunk->logical)
		pass->next_used++;
	return 0;
}

/* A set bit is a free sector. */
static int take_bitmap(struct free_pass *pass, struct cursor *cursor)
{
	uint64_t bits = cursor->key.offset / SECTOR_BYTES, from = 0;

	if (bits > (uint64_t)cursor->size * 8)
		return cursor_fail(cursor, "%" PRIu32 " bytes do not hold %" PRIu64 " bits",
				   cursor->size, bits);
	for (uint64_t i = 0; i <= bits; i++) {
		bool is_free = i < bits && cursor->data[i / 8] >> i % 8 & 1;

		if (!is_free) {
			if (i > from)
				take_range(pass, cursor->key.objectid + from * SECTOR_BYTES,
					   (i - from) * SECTOR_BYTES);
			from = i + 1;
		}
	}
	return 0;
}

static int take_item(struct free_pass *pass, struct cursor *cursor)
{
	const struct key *key = &cursor->key;
	bool is_bitmap = key->type == KEY_FREE_SPACE_BITMAP;

	if (key->type == KEY_FREE_SPACE_INFO)
		return begin_group(pass, cursor);
	if (key->type != KEY_FREE_SPACE_EXTENT && !is_bitmap)
		return 0;
	if (key->objectid >= pass->stale_start && key->objectid < pass->stale_end)
		return 0;
	if (!pass->chunk || key->objectid < pass->chunk->logical ||
	    key->objectid - pass->chunk->logical > pass->chunk->length ||
	    key->offset > pass->chunk->length - (key->objectid - pass->chunk->logical))
		return cursor_fail(cursor, "it is not within a block group");
	if (is_bitmap != pass->bitmaps)
		return cursor_fail(cursor, "the block group's info says that it uses %s",
				   pass->bitmaps ? "bitmaps" : "extents");
	if (!key->offset || (key->objectid | key->offset) % SECTOR_BYTES)
		return cursor_fail(cursor, "address or length is not a multiple of %d",
				   SECTOR_BYTES);
	if (is_bitmap)
		return take_bitmap(pass, cursor);
	take_range(pass, key->objectid, key->offset);
	return 0;
}

int check_free_space(struct check *check)
{
	const uint64_t wanted = COMPAT_RO_FREE_SPACE_TREE | COMPAT_RO_FREE_SPACE_TREE_VALID;
	_cleanup_(cursor_close) struct cursor cursor = { 0 };
	struct free_pass pass = { .check = check };
	struct block_expect root;
	int ret;

	if ((le64toh(check->reader->super.compat_ro_flags) & wanted) != wanted) {
		report_note(check->report,
			    "free space was not compared, as there is no valid free-space tree");
		return 0;
	}
	if (!check->used_known) {
		report_note(check->report,
			    "free space was not compared, as the extent tree is damaged");
		return 0;
	}
	ret = tree_root_find(check->reader, TREE_FREE_SPACE, &root);
	if (ret)
		return check_damage(check, RULE_TREE, ret);
	cursor_init(&cursor, check->reader, &root);
	for (ret = cursor_first(&cursor); ret > 0; ret = cursor_next(&cursor)) {
		ret = check_damage(check, RULE_FREE_SPACE, take_item(&pass, &cursor));
		if (ret)
			return ret;
	}
	if (ret < 0)
		return check_damage(check, RULE_TREE, ret);
	finish_group(&pass);
	while (pass.next_chunk < check->reader->chunks.count)
		missing_info(&pass);
	return 0;
}
