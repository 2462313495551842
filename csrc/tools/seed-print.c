/* SPDX-License-Identifier: MIT */
#include "tools/seed-print.h"

#include <errno.h>
#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include <string.h>
#include <uuid/uuid.h>

#include "base/cleanup.h"
#include "base/json_text.h"
#include "btrfs/super.h"

struct flag_name {
	uint64_t flag;
	const char *name;
};

/* BTRFS_SUPER_FLAG_*, BTRFS_FEATURE_INCOMPAT_*, BTRFS_FEATURE_COMPAT_RO_*, BTRFS_INODE_*. */
static const struct flag_name super_flags[] = {
	{ SUPER_WRITTEN, "WRITTEN" },
	{ SUPER_SEEDING, "SEEDING" },
	{ 0 },
};
static const struct flag_name incompat_flags[] = {
	{ INCOMPAT_MIXED_BACKREF, "MIXED_BACKREF" },
	{ 1 << 1, "DEFAULT_SUBVOL" },
	{ 1 << 2, "MIXED_GROUPS" },
	{ 1 << 3, "COMPRESS_LZO" },
	{ 1 << 4, "COMPRESS_ZSTD" },
	{ INCOMPAT_BIG_METADATA, "BIG_METADATA" },
	{ INCOMPAT_EXTENDED_IREF, "EXTENDED_IREF" },
	{ INCOMPAT_SKINNY_METADATA, "SKINNY_METADATA" },
	{ INCOMPAT_NO_HOLES, "NO_HOLES" },
	{ 1 << 10, "METADATA_UUID" },
	{ 1 << 16, "SIMPLE_QUOTA" },
	{ 0 },
};
static const struct flag_name compat_ro_flags[] = {
	{ COMPAT_RO_FREE_SPACE_TREE, "FREE_SPACE_TREE" },
	{ COMPAT_RO_FREE_SPACE_TREE_VALID, "FREE_SPACE_TREE_VALID" },
	{ 1 << 2, "VERITY" },
	{ COMPAT_RO_BLOCK_GROUP_TREE, "BLOCK_GROUP_TREE" },
	{ 0 },
};
static const struct flag_name inode_flags[] = {
	{ INODE_NODATASUM, "NODATASUM" },
	{ INODE_NODATACOW, "NODATACOW" },
	{ 1 << 2, "READONLY" },
	{ 1 << 3, "NOCOMPRESS" },
	{ 1 << 4, "PREALLOC" },
	{ 1 << 5, "SYNC" },
	{ INODE_IMMUTABLE, "IMMUTABLE" },
	{ 1 << 7, "APPEND" },
	{ 1 << 8, "NODUMP" },
	{ 1 << 9, "NOATIME" },
	{ 1 << 10, "DIRSYNC" },
	{ 1 << 11, "COMPRESS" },
	{ 0 },
};

/* Returns the names of the flags that are set, and one number for those without names. */
static json_t *json_flags(const struct flag_name *names, uint64_t flags)
{
	json_t *list = json_array();

	for (; names->flag; names++) {
		if (flags & names->flag)
			json_array_append_new(list, json_string(names->name));
		flags &= ~names->flag;
	}
	if (flags)
		json_array_append_new(list, json_sprintf("0x%" PRIx64, flags));
	return list;
}

/* Paths, names and labels may be any bytes, and JSON is Unicode. Other bytes are shown as \xNN. */
static json_t *json_bytes(const char *text)
{
	json_t *json = json_string(text);
	_cleanup_free_ char *escaped = NULL;
	char *at;

	if (json)
		return json;
	escaped = malloc(4 * strlen(text) + 1);
	if (!escaped)
		return NULL;
	for (at = escaped; *text; text++) {
		if ((unsigned char)*text >= 0x80)
			at += sprintf(at, "\\x%02x", (unsigned char)*text);
		else
			*at++ = *text;
	}
	*at = 0;
	return json_string(escaped);
}

static json_t *json_uuid(const uint8_t uuid[UUID_BYTES])
{
	char text[UUID_STR_LEN];

	uuid_unparse_lower(uuid, text);
	return json_string(text);
}

/* A summary of the chunks of one type and profile. */
struct chunk_sum {
	uint64_t type;
	uint64_t count, total, shortest, longest;
};

enum { CHUNK_SUMS_MAX = 16 }; /* four types and three profiles can be read */

static size_t sum_chunks(const struct chunk_list *chunks, struct chunk_sum sums[CHUNK_SUMS_MAX])
{
	size_t count = 0;

	for (size_t i = 0; i < chunks->count; i++) {
		const struct chunk *chunk = &chunks->chunks[i];
		struct chunk_sum *sum = sums;

		while (sum < sums + count && sum->type != chunk->type)
			sum++;
		if (sum == sums + count) {
			if (count == CHUNK_SUMS_MAX)
				continue;
			count++;
			*sum = (struct chunk_sum){ .type = chunk->type, .shortest = UINT64_MAX };
		}
		sum->count++;
		sum->total += chunk->length;
		sum->shortest = chunk->length < sum->shortest ? chunk->length : sum->shortest;
		sum->longest = chunk->length > sum->longest ? chunk->length : sum->longest;
	}
	return count;
}

static json_t *json_chunks(const struct chunk_list *chunks)
{
	struct chunk_sum sums[CHUNK_SUMS_MAX];
	size_t count = sum_chunks(chunks, sums);
	json_t *list = json_array();

	for (size_t i = 0; i < count; i++)
		json_array_append_new(list, json_pack("{ss ss sI sI sI sI}", "type",
						      chunk_type_name(sums[i].type), "profile",
						      chunk_profile_name(sums[i].type), "count",
						      (json_int_t)sums[i].count, "total_bytes",
						      (json_int_t)sums[i].total, "shortest_bytes",
						      (json_int_t)sums[i].shortest, "longest_bytes",
						      (json_int_t)sums[i].longest));
	return list;
}

static uint64_t device_offset(const struct reader *reader, uint64_t logical)
{
	const struct chunk *chunk = chunk_find(&reader->chunks, logical, 1);

	return chunk ? chunk->stripes[0] + (logical - chunk->logical) : UINT64_MAX;
}

static json_t *json_file(const struct reader *reader, const struct layout *layout)
{
	const struct virtual_file *file = &layout->file;
	uint64_t offset = device_offset(reader, file->logical);

	if (!layout->has_file)
		return json_null();
	return json_pack(
		"{so sI sI sI sI so so}", "filename", json_bytes(file->name), "inode",
		(json_int_t)file->inode_number, "size", (json_int_t)le64toh(file->inode.size),
		"extents", (json_int_t)file->extent_count, "preallocated_extents",
		(json_int_t)file->prealloc_count, "device_offset",
		file->extent_count && offset != UINT64_MAX ? json_integer((json_int_t)offset) :
							     json_null(),
		"flags", json_flags(inode_flags, le64toh(file->inode.flags)));
}

/* Returns the end of what must be stored: chunks of metadata, and mirrors of the superblock. */
static uint64_t local_end(const struct reader *reader)
{
	unsigned mirrors = super_mirror_count(reader->device_bytes);
	uint64_t end = super_mirror_offset(mirrors ? mirrors - 1 : 0) + SUPER_RESERVED_BYTES;

	for (size_t i = 0; i < reader->chunks.count; i++) {
		const struct chunk *chunk = &reader->chunks.chunks[i];

		for (unsigned j = 0; j < chunk->stripe_count; j++) {
			if ((chunk->type & CHUNK_TYPE_MASK) != CHUNK_DATA &&
			    chunk->stripes[j] + chunk->length > end)
				end = chunk->stripes[j] + chunk->length;
		}
	}
	return end < reader->device_bytes ? end : reader->device_bytes;
}

static json_t *layout_json(const char *path, const struct reader *reader,
			   const struct layout *layout)
{
	const struct disk_super *super = &reader->super;

	return json_pack(
		"{so so so so sI sI sI sI sI sI ss so so so sb ss sI sI so sb so}", "path",
		json_bytes(path), "fsid", json_uuid(super->fsid), "device_uuid",
		json_uuid(super->device.uuid), "label", json_bytes(super->label), "generation",
		(json_int_t)reader->generation, "device_bytes", (json_int_t)reader->device_bytes,
		"local_bytes", (json_int_t)local_end(reader), "file_bytes",
		(json_int_t)reader->file_bytes, "used_bytes",
		(json_int_t)le64toh(super->bytes_used), "node_bytes",
		(json_int_t)reader->node_bytes, "checksum", reader->csum->name, "flags",
		json_flags(super_flags, le64toh(super->flags)), "incompat_flags",
		json_flags(incompat_flags, le64toh(super->incompat_flags)), "compat_ro_flags",
		json_flags(compat_ro_flags, le64toh(super->compat_ro_flags)), "seeding",
		(int)layout->is_seeding, "strategy", layout_strategy_name(layout->strategy),
		"subvolumes", (json_int_t)layout->subvolume_count, "default_subvolume",
		(json_int_t)layout->default_subvolume, "chunks", json_chunks(&reader->chunks),
		"new_files_nodatasum", (int)!!(layout->top_flags & INODE_NODATACOW), "virtual_data",
		json_file(reader, layout));
}

int print_layout(const char *path, const struct reader *reader, const struct layout *layout)
{
	return json_text_print(layout_json(path, reader, layout));
}
