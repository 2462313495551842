/* SPDX-License-Identifier: MIT */
/* Reads the superblock, and checks what the kernel's btrfs_validate_super checks. */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "btrfs/reader.h"
#include "btrfs/super.h"

/* BTRFS_FEATURE_INCOMPAT_*. These change nothing in what this library reads. */
enum {
	INCOMPAT_MIXED_GROUPS = 1u << 2,
	INCOMPAT_COMPRESS_LZO = 1u << 3,
	INCOMPAT_SIMPLE_QUOTA = 1u << 16,
	/* This one says that tree blocks have another fsid than the superblock. */
	INCOMPAT_METADATA_UUID = 1u << 10,
};

static const uint64_t incompat_supported =
	INCOMPAT_MIXED_BACKREF | INCOMPAT_DEFAULT_SUBVOL | INCOMPAT_MIXED_GROUPS |
	INCOMPAT_COMPRESS_LZO | INCOMPAT_COMPRESS_ZSTD | INCOMPAT_BIG_METADATA |
	INCOMPAT_EXTENDED_IREF | INCOMPAT_SKINNY_METADATA | INCOMPAT_NO_HOLES |
	INCOMPAT_METADATA_UUID | INCOMPAT_SIMPLE_QUOTA;

/* Checks magic number, checksum and address of a superblock. Returns NULL, or what is wrong. */
static const char *identify(const struct disk_super *super, uint64_t offset)
{
	const struct csum_kind *csum = csum_kind_by_id(le16toh(super->csum_type));

	if (le64toh(super->magic) != SUPER_MAGIC)
		return "there is none: the magic number is wrong";
	if (!csum)
		return "its checksum type is not supported";
	if (!csum_block_matches(csum, super, sizeof(*super)))
		return "the checksum is wrong";
	if (le64toh(super->bytenr) != offset)
		return "its own address is wrong";
	return NULL;
}

static bool node_bytes_valid(uint32_t bytes)
{
	return bytes >= SECTOR_BYTES && bytes <= STRIPE_LEN && !(bytes & (bytes - 1));
}

static const char *check_layout(const struct disk_super *super)
{
	uint32_t node_bytes = le32toh(super->node_bytes);
	uint32_t array_bytes = le32toh(super->sys_chunk_array_bytes);

	if (!node_bytes_valid(node_bytes))
		return "nodesize is not a power of two from 4096 to 65536";
	if (le32toh(super->leaf_bytes) != node_bytes)
		return "leafsize is not the nodesize";
	if (super->root_level >= TREE_LEVELS || super->chunk_root_level >= TREE_LEVELS ||
	    super->log_root_level >= TREE_LEVELS)
		return "a tree is higher than trees can be";
	if (!super->root || le64toh(super->root) % SECTOR_BYTES)
		return "root is not the address of a block";
	if (!super->chunk_root || le64toh(super->chunk_root) % SECTOR_BYTES)
		return "chunk_root is not the address of a block";
	if (le64toh(super->log_root) % SECTOR_BYTES)
		return "log_root is not the address of a block";
	if (!super->generation ||
	    le64toh(super->chunk_root_generation) > le64toh(super->generation))
		return "generations are inconsistent";
	if (!super->total_bytes || le64toh(super->total_bytes) > INT64_MAX)
		return "total_bytes cannot be";
	if (le64toh(super->device.total_bytes) > le64toh(super->total_bytes) ||
	    le64toh(super->device.total_bytes) < SECTOR_BYTES)
		return "dev_item.total_bytes cannot be";
	if (le64toh(super->bytes_used) > INT64_MAX)
		return "bytes_used cannot be";
	if (array_bytes > SYS_CHUNK_ARRAY_BYTES)
		return "sys_chunk_array_size is larger than the array";
	if (!memchr(super->label, 0, sizeof(super->label)))
		return "the label does not end";
	return NULL;
}

/* Refuses file systems that are valid, but that this library cannot read. */
static int check_support(struct reader *reader, const struct disk_super *super)
{
	uint64_t unknown = le64toh(super->incompat_flags) & ~incompat_supported;

	if (le64toh(super->device_count) != 1)
		return reader_fail(reader, -ENOTSUP,
				   "superblock: the file system has %" PRIu64
				   " devices; only those of one device can be read",
				   le64toh(super->device_count));
	if (unknown)
		return reader_fail(reader, -ENOTSUP,
				   "superblock: incompat flags 0x%" PRIx64 " are not supported",
				   unknown);
	if (le32toh(super->sector_bytes) != SECTOR_BYTES)
		return reader_fail(reader, -ENOTSUP,
				   "superblock: a sectorsize of %" PRIu32
				   " is not supported, only %d",
				   le32toh(super->sector_bytes), SECTOR_BYTES);
	return 0;
}

int reader_read_super(struct reader *reader)
{
	struct disk_super *super = &reader->super;
	uint64_t offset = super_mirror_offset(0);
	const char *problem;
	int ret;

	ret = reader_pread(reader, "superblock", super, sizeof(*super), offset);
	if (ret)
		return ret;
	problem = identify(super, offset);
	if (!problem)
		problem = check_layout(super);
	if (problem)
		return reader_fail(reader, -EUCLEAN, "superblock at %" PRIu64 ": %s", offset,
				   problem);
	ret = check_support(reader, super);
	if (ret)
		return ret;
	reader->csum = csum_kind_by_id(le16toh(super->csum_type));
	reader->node_bytes = le32toh(super->node_bytes);
	reader->generation = le64toh(super->generation);
	reader->devid = le64toh(super->device.devid);
	reader->device_bytes = le64toh(super->device.total_bytes);
	memcpy(reader->block_fsid,
	       le64toh(super->incompat_flags) & INCOMPAT_METADATA_UUID ? super->metadata_uuid :
									 super->fsid,
	       UUID_BYTES);
	return 0;
}
