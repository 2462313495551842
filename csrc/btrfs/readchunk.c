/* SPDX-License-Identifier: MIT */
/* Reads chunks: first the superblock's, which lead to the chunk tree, then all in that tree. */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/array.h"
#include "base/cleanup.h"
#include "btrfs/cursor.h"
#include "btrfs/reader.h"

/* BTRFS_BLOCK_GROUP_PROFILE_MASK: RAID0, RAID1, DUP, RAID10, RAID5, RAID6, RAID1C3, RAID1C4. */
#define CHUNK_PROFILE_MASK (0xffULL << 3)

/* Returns NULL, or what is wrong. */
static const char *check_chunk(const struct reader *reader, const struct key *key,
			       const struct disk_chunk *disk)
{
	uint64_t length = le64toh(disk->length), type = le64toh(disk->type);

	if (key->objectid != OBJECT_FIRST_CHUNK || key->type != KEY_CHUNK_ITEM)
		return "its key is not that of a chunk";
	if (!length || length % SECTOR_BYTES || key->offset % SECTOR_BYTES)
		return "its address or length is not a multiple of the sector size";
	if (key->offset > INT64_MAX || length > INT64_MAX - key->offset)
		return "it ends beyond all addresses";
	if (length > reader->device_bytes)
		return "it is longer than the device";
	if (le64toh(disk->stripe_len) != STRIPE_LEN)
		return "its stripe length is not 65536";
	if (!(type & CHUNK_TYPE_MASK) || type & ~(CHUNK_TYPE_MASK | CHUNK_PROFILE_MASK))
		return "its type is unknown";
	return NULL;
}

/* Accepts one copy, which RAID0 of a single stripe is, too, or two on the same device. */
static bool profile_supported(uint64_t type, unsigned stripe_count)
{
	switch (type & CHUNK_PROFILE_MASK) {
	case 0:
	case CHUNK_RAID0:
		return stripe_count == 1;
	case CHUNK_DUP:
		return stripe_count == 2;
	default:
		return false;
	}
}

/* Parses a chunk item, or an entry of the superblock's array; `where` begins the reason. */
static int parse_chunk(struct reader *reader, const char *where, const struct key *key,
		       const void *data, size_t size, struct chunk *chunk)
{
	struct disk_chunk disk;
	struct disk_stripe stripe;
	const char *problem;

	*chunk = (struct chunk){ 0 };
	if (size < sizeof(disk) + sizeof(stripe))
		return reader_fail(reader, -EUCLEAN, "%s: a chunk item has more than %zu bytes",
				   where, size);
	memcpy(&disk, data, sizeof(disk));
	problem = check_chunk(reader, key, &disk);
	if (problem)
		return reader_fail(reader, -EUCLEAN, "%s: %s", where, problem);
	*chunk = (struct chunk){
		.logical = key->offset,
		.length = le64toh(disk.length),
		.type = le64toh(disk.type),
		.stripe_count = le16toh(disk.stripe_count),
	};
	if (size < sizeof(disk) + chunk->stripe_count * sizeof(stripe))
		return reader_fail(reader, -EUCLEAN, "%s: %u stripes do not fit in %zu bytes",
				   where, chunk->stripe_count, size);
	if (!profile_supported(chunk->type, chunk->stripe_count))
		return reader_fail(reader, -ENOTSUP,
				   "%s: type 0x%" PRIx64 " with %u stripes is not supported, only "
				   "SINGLE and DUP on one device",
				   where, chunk->type, chunk->stripe_count);
	for (unsigned i = 0; i < chunk->stripe_count; i++) {
		memcpy(&stripe, (const uint8_t *)data + sizeof(disk) + i * sizeof(stripe),
		       sizeof(stripe));
		chunk->stripes[i] = le64toh(stripe.offset);
		if (le64toh(stripe.devid) != reader->devid)
			return reader_fail(reader, -EUCLEAN,
					   "%s, stripe %u: it is on device %" PRIu64
					   ", the file system's only one is %" PRIu64,
					   where, i, le64toh(stripe.devid), reader->devid);
		if (chunk->stripes[i] % SECTOR_BYTES ||
		    chunk->stripes[i] > reader->device_bytes - chunk->length)
			return reader_fail(reader, -EUCLEAN,
					   "%s, stripe %u: %" PRIu64 " bytes at %" PRIu64
					   " do not fit on the device, which ends at %" PRIu64,
					   where, i, chunk->length, chunk->stripes[i],
					   reader->device_bytes);
	}
	return 0;
}

/* Inserts a chunk in its place. Mostly that is the end, as chunks tend to come in order. */
static int insert_chunk(struct reader *reader, const char *where, struct chunk_list *list,
			const struct chunk *chunk)
{
	size_t slot = list->count;

	if (array_reserve(list->chunks, list->capacity, list->count + 1))
		return reader_fail(reader, -ENOMEM, "%s: no memory", where);
	while (slot && list->chunks[slot - 1].logical > chunk->logical)
		slot--;
	if ((slot &&
	     chunk->logical - list->chunks[slot - 1].logical < list->chunks[slot - 1].length) ||
	    (slot < list->count && list->chunks[slot].logical - chunk->logical < chunk->length))
		return reader_fail(reader, -EUCLEAN, "%s: it overlaps another chunk", where);
	memmove(&list->chunks[slot + 1], &list->chunks[slot],
		(list->count - slot) * sizeof(*chunk));
	list->chunks[slot] = *chunk;
	list->count++;
	return 0;
}

static int read_system_array(struct reader *reader, struct chunk_list *list)
{
	const uint8_t *array = reader->super.sys_chunk_array;
	size_t end = le32toh(reader->super.sys_chunk_array_bytes), at = 0;

	while (at < end) {
		struct disk_key disk_key;
		struct disk_chunk disk;
		struct chunk chunk;
		struct key key;
		char where[64];
		int ret;

		snprintf(where, sizeof(where), "superblock, sys_chunk_array, entry at %zu", at);
		if (end - at < sizeof(disk_key) + sizeof(disk))
			return reader_fail(reader, -EUCLEAN, "%s: it is cut off", where);
		memcpy(&disk_key, array + at, sizeof(disk_key));
		key = key_from_disk(&disk_key);
		at += sizeof(disk_key);
		ret = parse_chunk(reader, where, &key, array + at, end - at, &chunk);
		if (!ret && !(chunk.type & CHUNK_SYSTEM))
			ret = reader_fail(reader, -EUCLEAN, "%s: its type is not SYSTEM", where);
		if (!ret)
			ret = insert_chunk(reader, where, list, &chunk);
		if (ret)
			return ret;
		at += sizeof(disk) + chunk.stripe_count * sizeof(struct disk_stripe);
	}
	return 0;
}

static int read_chunk_tree(struct reader *reader, const struct block_expect *root,
			   struct chunk_list *list)
{
	_cleanup_(cursor_close) struct cursor cursor;
	struct key first = { OBJECT_FIRST_CHUNK, KEY_CHUNK_ITEM, 0 };
	int ret;

	cursor_init(&cursor, reader, root);
	for (ret = cursor_seek(&cursor, &first); ret > 0; ret = cursor_next(&cursor)) {
		char where[CURSOR_NAME_BYTES];
		struct chunk chunk;

		if (cursor.key.objectid != first.objectid || cursor.key.type != first.type)
			break;
		cursor_name(&cursor, where);
		ret = parse_chunk(reader, where, &cursor.key, cursor.data, cursor.size, &chunk);
		if (!ret)
			ret = insert_chunk(reader, where, list, &chunk);
		if (ret)
			return ret;
	}
	return ret < 0 ? ret : 0;
}

static bool chunks_equal(const struct chunk *a, const struct chunk *b)
{
	return a->logical == b->logical && a->length == b->length && a->type == b->type &&
	       a->stripe_count == b->stripe_count &&
	       memcmp(a->stripes, b->stripes, sizeof(a->stripes)) == 0;
}

int reader_read_chunks(struct reader *reader)
{
	_cleanup_(chunk_list_deinit) struct chunk_list all = { 0 };
	_cleanup_free_ void *block = malloc(reader->node_bytes);
	struct chunk_list system;
	struct block_expect root;
	int ret;

	if (!block)
		return reader_fail(reader, -ENOMEM, "chunk tree: no memory");
	ret = read_system_array(reader, &reader->chunks);
	if (ret)
		return ret;
	/* The superblock lacks the UUID that is in all blocks; the chunk tree's root has it. */
	tree_root_of_super(reader, TREE_CHUNK, &root);
	ret = reader_read_block(reader, &root, block);
	if (ret)
		return ret;
	memcpy(reader->chunk_tree_uuid, ((struct disk_header *)block)->chunk_tree_uuid, UUID_BYTES);
	reader->has_chunk_tree_uuid = true;
	ret = read_chunk_tree(reader, &root, &all);
	if (ret)
		return ret;
	for (size_t i = 0; i < reader->chunks.count; i++) {
		const struct chunk *chunk = &reader->chunks.chunks[i];
		const struct chunk *same = chunk_find(&all, chunk->logical, chunk->length);

		if (!same || !chunks_equal(chunk, same))
			return reader_fail(reader, -EUCLEAN,
					   "superblock, sys_chunk_array: the chunk at %" PRIu64
					   " is not as in the chunk tree",
					   chunk->logical);
	}
	system = reader->chunks;
	reader->chunks = all;
	all = system;
	return 0;
}
