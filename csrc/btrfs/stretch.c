/* SPDX-License-Identifier: MIT */
#include "btrfs/stretch.h"

#include <errno.h>
#include <inttypes.h>
#include <string.h>
#include <unistd.h>

#include "base/cleanup.h"
#include "btrfs/block.h"
#include "btrfs/cursor.h"

enum { EDITS = 4 };

/* A single-block tree that is being changed in memory. */
struct edit {
	struct reader *reader;
	struct block_expect root;
	uint8_t *leaf;
};

static void edit_deinit(struct edit *edit)
{
	free(edit->leaf);
}

static int edit_open(struct edit *edit, struct reader *reader, uint64_t tree)
{
	char name[TREE_NAME_BYTES];
	int ret = tree_root_find(reader, tree, &edit->root);

	if (ret)
		return ret;
	edit->reader = reader;
	if (edit->root.level)
		return reader_fail(reader, -EINVAL,
				   "%s: it has more than one block: the file "
				   "system is not new",
				   tree_name(tree, name));
	edit->leaf = malloc(reader->node_bytes);
	if (!edit->leaf)
		return reader_fail(reader, -ENOMEM, "no memory for a tree block");
	return reader_read_block(reader, &edit->root, edit->leaf);
}

/* Renames the item's key to `renamed`. Returns the item's data, or NULL with a reason. */
static void *edit_item(struct edit *edit, const struct key *key, const struct key *renamed,
		       size_t size)
{
	char name[TREE_NAME_BYTES], text[KEY_TEXT_BYTES];

	for (uint32_t slot = 0; slot < block_count(edit->leaf); slot++) {
		struct disk_item *item = block_item(edit->leaf, slot);
		struct key found = key_from_disk(&item->key);

		if (key_compare(&found, key) || le32toh(item->size) < size)
			continue;
		item->key = key_to_disk(renamed);
		return block_item_data(edit->leaf, item);
	}
	reader_fail(edit->reader, -EINVAL, "%s: there is no item %s of at least %zu bytes",
		    tree_name(edit->root.tree, name), key_text(key, text), size);
	return NULL;
}

static struct key key_of(uint64_t objectid, uint8_t type, uint64_t offset)
{
	return (struct key){ objectid, type, offset };
}

/* Edits the chunk, and the device item's sum of what all chunks occupy. */
static int edit_chunk_tree(struct edit *edit, const struct chunk *old, const struct chunk *new,
			   struct disk_super *super)
{
	struct key device_key = key_of(OBJECT_DEV_ITEMS, KEY_DEV_ITEM, edit->reader->devid);
	struct key from = key_of(OBJECT_FIRST_CHUNK, KEY_CHUNK_ITEM, old->logical);
	struct key to = key_of(OBJECT_FIRST_CHUNK, KEY_CHUNK_ITEM, new->logical);
	struct disk_device *device =
		edit_item(edit, &device_key, &device_key, sizeof(struct disk_device));
	struct disk_chunk *chunk =
		edit_item(edit, &from, &to, sizeof(*chunk) + sizeof(struct disk_stripe));
	struct disk_stripe *stripe;

	if (!device || !chunk)
		return -EINVAL;
	device->bytes_used = htole64(le64toh(device->bytes_used) - old->length + new->length);
	super->device.bytes_used = device->bytes_used;
	chunk->length = htole64(new->length);
	stripe = (struct disk_stripe *)(chunk + 1);
	stripe->offset = htole64(new->stripes[0]);
	return 0;
}

static int edit_device_tree(struct edit *edit, const struct chunk *old, const struct chunk *new)
{
	struct key from = key_of(edit->reader->devid, KEY_DEV_EXTENT, old->stripes[0]);
	struct key to = key_of(edit->reader->devid, KEY_DEV_EXTENT, new->stripes[0]);
	struct disk_dev_extent *extent = edit_item(edit, &from, &to, sizeof(*extent));

	if (!extent)
		return -EINVAL;
	extent->chunk_offset = htole64(new->logical);
	extent->length = htole64(new->length);
	return 0;
}

static int edit_block_group(struct edit *edit, const struct chunk *old, const struct chunk *new)
{
	struct key from = key_of(old->logical, KEY_BLOCK_GROUP_ITEM, old->length);
	struct key to = key_of(new->logical, KEY_BLOCK_GROUP_ITEM, new->length);
	struct disk_block_group *group = edit_item(edit, &from, &to, sizeof(*group));

	if (!group)
		return -EINVAL;
	if (group->used)
		return reader_fail(edit->reader, -EINVAL,
				   "the data chunk at %" PRIu64 " is in use: the file system is "
				   "not new",
				   old->logical);
	return 0;
}

static int edit_free_space(struct edit *edit, const struct chunk *old, const struct chunk *new)
{
	struct key info_from = key_of(old->logical, KEY_FREE_SPACE_INFO, old->length);
	struct key info_to = key_of(new->logical, KEY_FREE_SPACE_INFO, new->length);
	struct key from = key_of(old->logical, KEY_FREE_SPACE_EXTENT, old->length);
	struct key to = key_of(new->logical, KEY_FREE_SPACE_EXTENT, new->length);

	if (!edit_item(edit, &info_from, &info_to, sizeof(struct disk_free_space_info)) ||
	    !edit_item(edit, &from, &to, 0))
		return -EINVAL;
	return 0;
}

static int prepare(struct reader *reader, struct edit edits[EDITS], const struct chunk *old,
		   const struct chunk *new, struct disk_super *super)
{
	bool has_group_tree = le64toh(super->compat_ro_flags) & COMPAT_RO_BLOCK_GROUP_TREE;
	const uint64_t trees[EDITS] = {
		TREE_CHUNK,
		TREE_DEV,
		has_group_tree ? TREE_BLOCK_GROUP : TREE_EXTENT,
		TREE_FREE_SPACE,
	};
	int ret = 0;

	for (int i = 0; i < EDITS && !ret; i++)
		ret = edit_open(&edits[i], reader, trees[i]);
	if (!ret)
		ret = edit_chunk_tree(&edits[0], old, new, super);
	if (!ret)
		ret = edit_device_tree(&edits[1], old, new);
	if (!ret)
		ret = edit_block_group(&edits[2], old, new);
	if (!ret)
		ret = edit_free_space(&edits[3], old, new);
	/* Verify the changed blocks as if they had been read: mainly the order of the keys. */
	for (int i = 0; i < EDITS && !ret; i++) {
		csum_block_set(reader->csum, edits[i].leaf, reader->node_bytes);
		ret = block_verify(reader, &edits[i].root, edits[i].leaf);
	}
	return ret;
}

static int check_place(struct reader *reader, const struct chunk *new)
{
	uint64_t end;

	if (new->logical % STRIPE_LEN || !new->length || new->length % STRIPE_LEN ||
	    new->length > CHUNK_LENGTH_MAX ||
	    __builtin_add_overflow(new->logical, new->length, &end) || end > reader->device_bytes)
		return reader_fail(reader, -EINVAL,
				   "a chunk of %" PRIu64 " bytes at %" PRIu64
				   " cannot be: it has to be on the device (%" PRIu64
				   " bytes), of multiples of %d, of at most %llu bytes",
				   new->length, new->logical, reader->device_bytes, STRIPE_LEN,
				   CHUNK_LENGTH_MAX);
	for (size_t i = 0; i < reader->chunks.count; i++) {
		const struct chunk *chunk = &reader->chunks.chunks[i];

		if (chunk->type & CHUNK_DATA)
			continue;
		if (new->logical < chunk->logical + chunk->length)
			return reader_fail(reader, -EINVAL,
					   "a data chunk at %" PRIu64 " is not behind the chunk at "
					   "%" PRIu64,
					   new->logical, chunk->logical);
		for (unsigned j = 0; j < chunk->stripe_count; j++) {
			if (new->logical < chunk->stripes[j] + chunk->length)
				return reader_fail(reader, -EINVAL,
						   "a data chunk at %" PRIu64
						   " is not behind the device extent at %" PRIu64,
						   new->logical, chunk->stripes[j]);
		}
	}
	return 0;
}

/* Returns the only data chunk, or NULL with a reason. */
static const struct chunk *find_data_chunk(struct reader *reader)
{
	const struct chunk *data = NULL;
	unsigned count = 0;

	for (size_t i = 0; i < reader->chunks.count; i++) {
		if (reader->chunks.chunks[i].type & CHUNK_DATA) {
			data = &reader->chunks.chunks[i];
			count++;
		}
	}
	if (count == 1 && data->type == CHUNK_DATA && data->stripe_count == 1)
		return data;
	reader_fail(reader, -EINVAL,
		    "the file system is not new, or was not made for this: one "
		    "data chunk of profile SINGLE is expected");
	return NULL;
}

int stretch_data_chunk(struct reader *reader, int fd, uint64_t start, uint64_t length)
{
	struct chunk new = {
		.logical = start,
		.length = length,
		.type = CHUNK_DATA,
		.stripe_count = 1,
		.stripes = { start },
	};
	const struct chunk *old = find_data_chunk(reader);
	struct edit edits[EDITS] = { 0 };
	struct disk_super super = reader->super;
	int ret;

	if (!old)
		return -EINVAL;
	if (super.log_root)
		return reader_fail(reader, -EINVAL,
				   "superblock: there is a log tree, so the file "
				   "system is not new");
	ret = check_place(reader, &new);
	if (!ret)
		ret = prepare(reader, edits, old, &new, &super);
	for (int i = 0; i < EDITS && !ret; i++)
		ret = reader_write_block(reader, fd, edits[i].root.bytenr, edits[i].leaf);
	for (int i = 0; i < EDITS; i++)
		edit_deinit(&edits[i]);
	if (!ret)
		ret = reader_write_super(reader, fd, &super);
	if (!ret && fsync(fd))
		ret = reader_fail(reader, -errno, "cannot write it to disk: %s", strerror(errno));
	return ret;
}
