/* SPDX-License-Identifier: MIT */
#include "btrfs/reader.h"

#include <errno.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/cleanup.h"
#include "base/fileio.h"
#include "btrfs/block.h"
#include "btrfs/super.h"

int reader_fail(struct reader *reader, int error_number, const char *format, ...)
{
	char text[READER_ERROR_BYTES];
	va_list args;

	/* The old reason may be one of the arguments. */
	va_start(args, format);
	vsnprintf(text, sizeof(text), format, args);
	va_end(args);
	memcpy(reader->error, text, sizeof(text));
	return error_number;
}

int reader_pread(struct reader *reader, const char *what, void *data, size_t length,
		 uint64_t offset)
{
	int ret;

	if (offset > reader->file_bytes || length > reader->file_bytes - offset)
		return reader_fail(reader, -EIO,
				   "%s: its place, %" PRIu64 " on the device, is beyond the end "
				   "of the image at %" PRIu64,
				   what, offset, reader->file_bytes);
	ret = pread_full(reader->fd, data, length, offset);
	if (ret)
		return reader_fail(reader, ret, "%s: cannot read at %" PRIu64 ": %s", what, offset,
				   strerror(-ret));
	return 0;
}

int reader_open(struct reader *reader, int fd)
{
	off_t end = lseek(fd, 0, SEEK_END);
	int ret;

	*reader = (struct reader){ .fd = fd };
	if (end < 0)
		return reader_fail(reader, -errno, "cannot find out its size: %s", strerror(errno));
	reader->file_bytes = (uint64_t)end;
	ret = reader_read_supers(reader);
	if (!ret)
		ret = reader_read_chunks(reader);
	if (ret)
		reader_close(reader);
	return ret;
}

void reader_close(struct reader *reader)
{
	chunk_list_deinit(&reader->chunks);
}

const struct chunk *reader_map(struct reader *reader, uint64_t logical, uint64_t length)
{
	const struct chunk *chunk = chunk_find(&reader->chunks, logical, length);

	if (!chunk)
		reader_fail(reader, -EUCLEAN,
			    "logical address %" PRIu64 " (%" PRIu64 " bytes) is in no chunk",
			    logical, length);
	return chunk;
}

/* The chunk of a tree block. */
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
	return ret ? ret : block_verify(reader, expect, block);
}

int reader_compare_copies(struct reader *reader, const struct block_expect *expect,
			  const void *block)
{
	_cleanup_free_ void *other = malloc(reader->node_bytes);
	char where[BLOCK_NAME_BYTES];
	const struct chunk *chunk;

	block_name(expect, where);
	chunk = map_block(reader, where, expect->bytenr);
	if (!chunk)
		return -EUCLEAN;
	if (!other)
		return reader_fail(reader, -ENOMEM, "%s: no memory", where);
	for (unsigned i = 1; i < chunk->stripe_count; i++) {
		uint64_t offset = copy_offset(chunk, i, expect->bytenr);
		int ret = reader_pread(reader, where, other, reader->node_bytes, offset);

		if (ret)
			return ret;
		if (memcmp(block, other, reader->node_bytes) != 0)
			return reader_fail(reader, -EUCLEAN,
					   "%s: copy %u, %" PRIu64
					   " on the device, differs from the first",
					   where, i + 1, offset);
	}
	return 0;
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

int reader_write_super(struct reader *reader, int fd, const struct disk_super *super)
{
	int ret = super_write(fd, super, reader->csum);

	if (ret)
		return reader_fail(reader, ret, "superblock: cannot write: %s", strerror(-ret));
	reader->super = *super;
	reader->super.bytenr = htole64(super_mirror_offset(0));
	csum_block_set(reader->csum, &reader->super, sizeof(reader->super));
	return 0;
}
