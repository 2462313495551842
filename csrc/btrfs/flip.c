/* SPDX-License-Identifier: MIT */
#include "btrfs/flip.h"

#include <errno.h>
#include <inttypes.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/cleanup.h"
#include "base/size.h"
#include "btrfs/cursor.h"
#include "btrfs/walk.h"

/* BTRFS_FEATURE_INCOMPAT_METADATA_UUID: kernels refuse it together with SEEDING. */
#define INCOMPAT_METADATA_UUID (1ULL << 10)
/* BTRFS_FEATURE_COMPAT_RO_VERITY: concerns only files that use it. */
#define COMPAT_RO_VERITY (1ULL << 2)
static const uint64_t compat_ro_known = COMPAT_RO_FREE_SPACE_TREE |
					COMPAT_RO_FREE_SPACE_TREE_VALID | COMPAT_RO_VERITY |
					COMPAT_RO_BLOCK_GROUP_TREE;
/* BTRFS_TREE_RELOC_OBJECTID: copies of trees that a balance is moving. */
#define TREE_RELOC ((uint64_t)-8)
/* BTRFS_BLOCK_FLAG_FULL_BACKREF: other trees than its owner use the block. */
#define EXTENT_FULL_BACKREF_FLAG (1ULL << 8)

/* The state of a walk over the file tree. */
struct flip_walk {
	struct walk walk;
	struct flip *flip;
	int fd; /* where to write; -1: only check */
	struct block_set blocks;
	uint64_t position; /* file offset up to which extents have been seen */
	bool has_inode;
};

static struct flip_walk *flip_walk_of(struct walk *walk)
{
	return walk->context;
}

/*
 * Turns the file's preallocated extents in a leaf into regular ones; returns how many they were.
 * NB: the leaf may be damaged, so the result needs block_verify().
 */
static unsigned flip_leaf(const struct reader *reader, uint64_t inode, uint8_t *leaf)
{
	const size_t data_bytes = reader->node_bytes - sizeof(struct disk_header);
	size_t count = block_count(leaf);
	unsigned flipped = 0;

	if (count > data_bytes / sizeof(struct disk_item))
		return 0;
	for (size_t slot = 0; slot < count; slot++) {
		const struct disk_item *item = block_item(leaf, slot);
		struct key key = key_from_disk(&item->key);
		struct disk_file_extent *extent;

		if (key.objectid != inode || key.type != KEY_EXTENT_DATA ||
		    le32toh(item->size) != sizeof(*extent) ||
		    le32toh(item->offset) > data_bytes - sizeof(*extent))
			continue;
		extent = (struct disk_file_extent *)block_item_data(leaf, item);
		if (extent->type == FILE_EXTENT_PREALLOC) {
			extent->type = FILE_EXTENT_REGULAR;
			flipped++;
		}
	}
	return flipped;
}

static int fail_item(struct reader *reader, const struct block_expect *expect, uint32_t slot,
		     const struct key *key, const char *problem)
{
	char block[BLOCK_NAME_BYTES], text[KEY_TEXT_BYTES];

	return reader_fail(reader, -EUCLEAN, "%s, item %" PRIu32 " %s: %s",
			   block_name(expect, block), slot, key_text(key, text), problem);
}

static const char *check_inode(struct flip_walk *walk, const uint8_t *data, size_t size)
{
	struct disk_inode inode;

	if (size != sizeof(inode))
		return "an inode item has an unexpected size";
	memcpy(&inode, data, sizeof(inode));
	if (!S_ISREG(le32toh(inode.mode)))
		return "it is not a regular file";
	if (!(le64toh(inode.flags) & INODE_NODATASUM))
		return "the file has checksums, which its extents would then lack (chattr +C it "
		       "while it is empty)";
	if (!le32toh(inode.link_count))
		return "the file has been removed";
	if (!inode.size || le64toh(inode.size) > INT64_MAX)
		return "the file is empty, or too long";
	walk->flip->file_bytes = le64toh(inode.size);
	walk->has_inode = true;
	return NULL;
}

static const char *check_extent(struct flip_walk *walk, uint64_t file_offset, const uint8_t *data,
				size_t size)
{
	const struct reader *reader = walk->walk.reader;
	struct disk_file_extent extent;
	uint64_t start, whole, inner, bytes;
	const struct chunk *chunk;

	if (size != sizeof(extent))
		return "it is neither a regular nor a preallocated extent";
	memcpy(&extent, data, sizeof(extent));
	start = le64toh(extent.disk_bytenr);
	whole = le64toh(extent.disk_bytes);
	inner = le64toh(extent.offset);
	bytes = le64toh(extent.bytes);
	if (extent.type != FILE_EXTENT_REGULAR && extent.type != FILE_EXTENT_PREALLOC)
		return "it is neither a regular nor a preallocated extent";
	if (extent.compression || extent.encryption || extent.other_encoding)
		return "it is compressed or encoded otherwise";
	if (!start || file_offset != walk->position)
		return "the file has a hole there or before";
	if (start % SECTOR_BYTES || whole % SECTOR_BYTES || inner % SECTOR_BYTES ||
	    bytes % SECTOR_BYTES || !bytes)
		return "its address or a length is not a multiple of the sector size";
	if (le64toh(extent.ram_bytes) != whole || inner > whole || bytes > whole - inner ||
	    bytes > INT64_MAX - file_offset)
		return "its lengths contradict each other";
	if (le64toh(extent.generation) > reader->generation)
		return "it is younger than the superblock";
	chunk = chunk_find(&reader->chunks, start, whole);
	if (!chunk || (chunk->type & CHUNK_TYPE_MASK) != CHUNK_DATA)
		return "it is in no data chunk";
	walk->position += bytes;
	walk->flip->extents++;
	walk->flip->prealloc_extents += extent.type == FILE_EXTENT_PREALLOC;
	return NULL;
}

/* Checks the file's items in a verified leaf. */
static int check_leaf(struct flip_walk *walk, const struct block_expect *expect, uint8_t *leaf)
{
	struct flip *flip = walk->flip;
	uint64_t before = flip->prealloc_extents;

	for (uint32_t slot = 0; slot < block_count(leaf); slot++) {
		const struct disk_item *item = block_item(leaf, slot);
		const uint8_t *data = block_item_data(leaf, item);
		struct key key = key_from_disk(&item->key);
		const char *problem = NULL;

		if (key.objectid != flip->inode)
			continue;
		if (key.type == KEY_INODE_ITEM)
			problem = check_inode(walk, data, le32toh(item->size));
		else if (key.type == KEY_EXTENT_DATA)
			problem = check_extent(walk, key.offset, data, le32toh(item->size));
		if (problem)
			return fail_item(walk->walk.reader, expect, slot, &key, problem);
	}
	flip->prealloc_leaves += flip->prealloc_extents > before;
	return 0;
}

/*
 * Returns 1 where another copy of a leaf of the file differs from the first one, which is good: a
 * killed run has written that one only. NB: the other's checksum may be right, and what it says of
 * the file is that it is zeroes. Else 0, or a negative errno.
 */
static int has_stale_copy(struct reader *reader, const struct block_expect *expect,
			  const void *leaf)
{
	int ret = reader_compare_copies(reader, expect, leaf);

	return ret == -EUCLEAN ? 1 : ret;
}

static int look(struct flip_walk *self, const struct block_expect *expect, void *leaf)
{
	struct flip *flip = self->flip;
	uint64_t before = flip->extents, to_flip = flip->prealloc_leaves;
	int ret = check_leaf(self, expect, leaf);

	if (ret || flip->extents == before || flip->prealloc_leaves > to_flip)
		return ret;
	ret = has_stale_copy(self->walk.reader, expect, leaf);
	flip->torn_leaves += ret > 0;
	return ret > 0 ? 0 : ret;
}

static int visit(struct walk *walk, const struct block_expect *expect, void *block)
{
	struct flip_walk *self = flip_walk_of(walk);
	int ret = 1;

	if (expect->level)
		return 0;
	if (self->fd < 0)
		return look(self, expect, block);
	if (!flip_leaf(walk->reader, self->flip->inode, block))
		ret = has_stale_copy(walk->reader, expect, block);
	return ret > 0 ? reader_write_block(walk->reader, self->fd, expect->bytenr, block) : ret;
}

/*
 * Completes a leaf that a killed run has written in part. The header with the new checksum was
 * written first, and the rest differs only in type bytes. So if the leaf does not verify with all
 * of these flipped, the damage is another one.
 */
static int complete_leaf(struct walk *walk, const struct block_expect *expect, int error_number)
{
	struct flip_walk *self = flip_walk_of(walk);
	struct reader *reader = walk->reader;
	const struct chunk *chunk = chunk_find(&reader->chunks, expect->bytenr, reader->node_bytes);
	_cleanup_free_ uint8_t *leaf = malloc(reader->node_bytes);
	char reason[READER_ERROR_BYTES];

	if (!leaf)
		return reader_fail(reader, -ENOMEM, "no memory for a tree block");
	if (error_number != -EUCLEAN || expect->level || !chunk)
		return error_number;
	memcpy(reason, reader->error, sizeof(reason));
	if (reader_pread(reader, "leaf", leaf, reader->node_bytes,
			 chunk->stripes[0] + (expect->bytenr - chunk->logical)) ||
	    !flip_leaf(reader, self->flip->inode, leaf) || block_verify(reader, expect, leaf))
		return reader_fail(reader, error_number, "%s", reason);
	if (self->fd >= 0)
		return reader_write_block(reader, self->fd, expect->bytenr, leaf);
	self->flip->torn_leaves++;
	if (block_set_add(&self->blocks, expect))
		return reader_fail(reader, -ENOMEM, "no memory for a list of tree blocks");
	return check_leaf(self, expect, leaf);
}

static int walk_files(struct reader *reader, struct flip_walk *self, bool looking)
{
	struct block_expect root;
	int ret = tree_root_find(reader, TREE_FS, &root);

	if (ret)
		return ret;
	self->walk = (struct walk){
		.reader = reader,
		.visited = looking ? &self->blocks : NULL,
		.visit = visit,
		.damaged = complete_leaf,
		.context = self,
	};
	return tree_walk(&self->walk, &root);
}

static int check_super(struct reader *reader)
{
	const struct disk_super *super = &reader->super;
	uint64_t unknown = le64toh(super->compat_ro_flags) & ~compat_ro_known;

	if (super->log_root)
		return reader_fail(reader, -EINVAL,
				   "superblock: there is a log tree (log_root %" PRIu64
				   "), so it was not unmounted cleanly: mount and unmount it first",
				   le64toh(super->log_root));
	if (le64toh(super->incompat_flags) & INCOMPAT_METADATA_UUID)
		return reader_fail(reader, -ENOTSUP,
				   "superblock: no kernel takes a seed whose fsid was changed "
				   "(incompat flag METADATA_UUID)");
	if (unknown)
		return reader_fail(reader, -ENOTSUP,
				   "superblock: compat_ro flags 0x%" PRIx64 " are not supported",
				   unknown);
	for (unsigned i = 0; i < SUPER_MIRRORS; i++) {
		if (reader->mirrors[i].state == MIRROR_CUT_OFF)
			return reader_fail(reader, -EIO,
					   "superblock mirror %u: its place, %" PRIu64
					   " on the device, is beyond the end of the image",
					   i, reader->mirrors[i].offset);
	}
	return 0;
}

/* Checks that there is no unfinished balance, nor a snapshot of the top-level subvolume. */
static int check_roots(struct reader *reader)
{
	_cleanup_(cursor_close) struct cursor cursor = { 0 };
	struct block_expect roots, root;
	struct disk_root item;
	int ret;

	tree_root_of_super(reader, TREE_ROOT, &roots);
	cursor_init(&cursor, reader, &roots);
	for (ret = cursor_first(&cursor); ret > 0; ret = cursor_next(&cursor)) {
		uint64_t objectid = cursor.key.objectid;

		if (cursor.key.type != KEY_ROOT_ITEM)
			continue;
		ret = tree_root_of_item(&cursor, &item, &root);
		if (ret)
			return ret;
		if (objectid == TREE_RELOC)
			return cursor_fail(&cursor, "a balance has not been finished");
		if (objectid == TREE_FS && item.last_snapshot)
			return cursor_fail(&cursor, "there has been a snapshot of it");
	}
	return ret;
}

/* Checks that nothing else refers to the file tree's blocks. Also counts all tree blocks. */
static int check_references(struct reader *reader, const struct block_set *blocks,
			    struct flip *flip)
{
	_cleanup_(cursor_close) struct cursor cursor = { 0 };
	struct block_expect root;
	struct disk_extent extent;
	uint64_t found = 0, count = 0;
	int ret = tree_root_find(reader, TREE_EXTENT, &root);

	if (ret)
		return ret;
	cursor_init(&cursor, reader, &root);
	for (ret = cursor_first(&cursor); ret > 0; ret = cursor_next(&cursor)) {
		if (cursor.key.type != KEY_METADATA_ITEM && cursor.key.type != KEY_EXTENT_ITEM)
			continue;
		ret = cursor_copy(&cursor, &extent, sizeof(extent));
		if (ret)
			return ret;
		if (!(le64toh(extent.flags) & EXTENT_TREE_BLOCK_FLAG))
			continue;
		count++;
		if (!block_set_find(blocks, cursor.key.objectid))
			continue;
		if (le64toh(extent.refs) != 1 || le64toh(extent.flags) & EXTENT_FULL_BACKREF_FLAG)
			return cursor_fail(&cursor, "the block is shared with a snapshot");
		found++;
	}
	if (!ret && found != blocks->count)
		ret = reader_fail(reader, -EUCLEAN,
				  "extent tree: only %" PRIu64 " of the file tree's %zu blocks are "
				  "in it",
				  found, blocks->count);
	flip->metadata_bytes = count * reader->node_bytes;
	return ret;
}

static int check_file(struct reader *reader, const struct flip_walk *walk)
{
	const struct flip *flip = walk->flip;

	if (!walk->has_inode)
		return reader_fail(reader, -ENOENT, "file tree: there is no inode %" PRIu64,
				   flip->inode);
	if (walk->position != round_up_u64(flip->file_bytes, SECTOR_BYTES))
		return reader_fail(reader, -EUCLEAN,
				   "file tree, inode %" PRIu64 ": its extents end at %" PRIu64
				   ", the file at %" PRIu64,
				   flip->inode, walk->position, flip->file_bytes);
	return 0;
}

int flip_check(struct reader *reader, struct flip *flip)
{
	struct flip_walk walk = { .flip = flip, .fd = -1 };
	int ret;

	*flip = (struct flip){ .inode = flip->inode };
	ret = check_super(reader);
	if (!ret)
		ret = check_roots(reader);
	if (!ret)
		ret = walk_files(reader, &walk, true);
	if (!ret)
		ret = check_file(reader, &walk);
	if (!ret)
		ret = check_references(reader, &walk.blocks, flip);
	block_set_deinit(&walk.blocks);
	return ret;
}

static int sync_image(struct reader *reader, int fd)
{
	if (!fsync(fd))
		return 0;
	return reader_fail(reader, -errno, "cannot write it to disk: %s", strerror(errno));
}

static bool mirrors_are_good(const struct reader *reader)
{
	for (unsigned i = 0; i < SUPER_MIRRORS; i++) {
		if (reader->mirrors[i].state == MIRROR_BAD)
			return false;
	}
	return true;
}

int flip_write(struct reader *reader, int fd, struct flip *flip)
{
	struct flip_walk walk = { .flip = flip, .fd = fd };
	struct disk_super super = reader->super;
	int ret;

	if (flip->prealloc_leaves || flip->torn_leaves) {
		ret = walk_files(reader, &walk, false);
		if (!ret)
			ret = sync_image(reader, fd);
		if (ret)
			return ret;
	}
	if (le64toh(super.flags) & SUPER_SEEDING && mirrors_are_good(reader))
		return 0;
	super.flags |= htole64(SUPER_SEEDING);
	ret = reader_write_super(reader, fd, &super);
	return ret ?: sync_image(reader, fd);
}
