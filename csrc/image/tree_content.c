/* SPDX-License-Identifier: MIT */
#include "image/tree_content.h"

#include <errno.h>
#include <inttypes.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "base/array.h"

enum {
	COMPRESSED_BYTES_MAX = 128 * 1024, /* BTRFS_MAX_COMPRESSED, and _UNCOMPRESSED */
	READ_BYTES = 1024 * 1024,
	WINDOW_LOG_MAX = 17, /* ZSTD_BTRFS_MAX_WINDOWLOG */
	TARGET_BYTES_MAX = 4095,
};

/* A file extent, checked. */
struct piece {
	uint64_t offset, bytes; /* in the file; behind its end, for whole sectors */
	bool is_hole, is_inline, is_packed;
	const uint8_t *inline_data;
	uint32_t inline_bytes;
	uint64_t ram_bytes;
	uint64_t disk_bytenr, disk_bytes;
	uint64_t extent_offset; /* of its first byte, in the unpacked extent */
};

void tree_content_deinit(struct tree_content *content)
{
	free(content->regions);
	free(content->target);
	free(content->raw);
	free(content->packed);
	ZSTD_freeDCtx(content->zstd);
	*content = (struct tree_content){ 0 };
}

static int no_memory(struct cursor *cursor)
{
	return reader_fail(cursor->reader, -ENOMEM, "no memory");
}

static int make_room(struct tree_content *content, struct cursor *cursor)
{
	if (!content->raw)
		content->raw = malloc(READ_BYTES);
	if (!content->packed)
		content->packed = malloc(COMPRESSED_BYTES_MAX);
	if (!content->zstd) {
		content->zstd = ZSTD_createDCtx();
		if (content->zstd && ZSTD_isError(ZSTD_DCtx_setParameter(
					     content->zstd, ZSTD_d_windowLogMax, WINDOW_LOG_MAX)))
			return no_memory(cursor);
	}
	return content->raw && content->packed && content->zstd ? 0 : no_memory(cursor);
}

static int check_inline(struct cursor *cursor, const struct disk_file_extent *disk,
			struct piece *piece)
{
	size_t head = offsetof(struct disk_file_extent, disk_bytenr);

	piece->is_inline = true;
	piece->inline_data = cursor->data + head;
	piece->inline_bytes = cursor->size - (uint32_t)head;
	piece->ram_bytes = piece->bytes = le64toh(disk->ram_bytes);
	if (piece->offset || !piece->ram_bytes || piece->ram_bytes > cursor->reader->node_bytes)
		return cursor_fail(cursor, "an inline extent of %" PRIu64 " bytes at %" PRIu64,
				   piece->ram_bytes, piece->offset);
	if (!piece->is_packed && piece->inline_bytes != piece->ram_bytes)
		return cursor_fail(cursor, "it has %" PRIu32 " bytes, and says %" PRIu64,
				   piece->inline_bytes, piece->ram_bytes);
	return 0;
}

static int check_regular(struct cursor *cursor, const struct disk_file_extent *disk,
			 struct piece *piece)
{
	piece->ram_bytes = le64toh(disk->ram_bytes);
	piece->disk_bytenr = le64toh(disk->disk_bytenr);
	piece->disk_bytes = le64toh(disk->disk_bytes);
	piece->extent_offset = le64toh(disk->offset);
	piece->bytes = le64toh(disk->bytes);
	piece->is_hole = !piece->disk_bytenr || disk->type == FILE_EXTENT_PREALLOC;
	if (!piece->bytes || piece->bytes % SECTOR_BYTES || piece->offset % SECTOR_BYTES ||
	    piece->bytes > INT64_MAX || piece->offset > INT64_MAX - piece->bytes)
		return cursor_fail(cursor, "%" PRIu64 " bytes of the file at %" PRIu64,
				   piece->bytes, piece->offset);
	if (piece->is_hole)
		return 0;
	if (piece->extent_offset > piece->ram_bytes ||
	    piece->bytes > piece->ram_bytes - piece->extent_offset)
		return cursor_fail(cursor,
				   "%" PRIu64 " bytes at %" PRIu64
				   " are not within the extent, which has %" PRIu64,
				   piece->bytes, piece->extent_offset, piece->ram_bytes);
	if (piece->is_packed &&
	    (piece->ram_bytes > COMPRESSED_BYTES_MAX || piece->disk_bytes > COMPRESSED_BYTES_MAX))
		return cursor_fail(cursor,
				   "a compressed extent of %" PRIu64 " bytes, %" PRIu64
				   " unpacked: at most is %d",
				   piece->disk_bytes, piece->ram_bytes, COMPRESSED_BYTES_MAX);
	if (!piece->is_packed && piece->ram_bytes != piece->disk_bytes)
		return cursor_fail(cursor, "it has %" PRIu64 " bytes, and %" PRIu64 " on disk",
				   piece->ram_bytes, piece->disk_bytes);
	return 0;
}

static int check_piece(struct cursor *cursor, struct piece *piece)
{
	struct disk_file_extent disk = { 0 };
	size_t head = offsetof(struct disk_file_extent, disk_bytenr);
	int ret = cursor_copy(cursor, &disk, head);

	*piece = (struct piece){
		.offset = cursor->key.offset,
		.is_packed = disk.compression != COMPRESSION_NONE,
	};
	if (ret)
		return ret;
	if (disk.encryption || disk.other_encoding ||
	    (disk.compression != COMPRESSION_NONE && disk.compression != COMPRESSION_ZSTD))
		return reader_fail(cursor->reader, -ENOTSUP,
				   "its compression has the number %u: only zstd can be read",
				   disk.compression);
	if (disk.type == FILE_EXTENT_INLINE)
		return check_inline(cursor, &disk, piece);
	if (disk.type != FILE_EXTENT_REGULAR && disk.type != FILE_EXTENT_PREALLOC)
		return cursor_fail(cursor, "an extent of type %u", disk.type);
	ret = cursor_copy(cursor, &disk, sizeof(disk));
	return ret ?: check_regular(cursor, &disk, piece);
}

/* Goes on to the file's next extent. Returns 1, 0 when there is none, or a negative errno. */
static int is_extent(const struct cursor *cursor, uint64_t inode, int ret)
{
	if (ret <= 0)
		return ret;
	return cursor->key.objectid == inode && cursor->key.type == KEY_EXTENT_DATA;
}

static int add_region(struct tree_content *content, struct cursor *cursor, uint64_t offset,
		      uint64_t bytes)
{
	struct tree_region *last =
		content->region_count ? &content->regions[content->region_count - 1] : NULL;

	if (last && last->offset + last->bytes == offset) {
		last->bytes += bytes;
		return 0;
	}
	if (array_reserve(content->regions, content->region_capacity, content->region_count + 1))
		return no_memory(cursor);
	content->regions[content->region_count++] = (struct tree_region){ offset, bytes };
	return 0;
}

static int take_target(struct tree_content *content, struct cursor *cursor, uint64_t inode,
		       const struct tree_entry *entry, int ret)
{
	struct piece piece;

	ret = is_extent(cursor, inode, ret);
	if (ret < 0)
		return ret;
	if (!ret)
		return reader_fail(cursor->reader, -EUCLEAN, "a symbolic link without a target");
	ret = check_piece(cursor, &piece);
	if (ret)
		return ret;
	if (!piece.is_inline || piece.is_packed || piece.bytes != entry->bytes ||
	    piece.bytes > TARGET_BYTES_MAX || memchr(piece.inline_data, 0, piece.inline_bytes))
		return cursor_fail(cursor, "a symbolic link cannot have this target");
	content->target = strndup((const char *)piece.inline_data, piece.inline_bytes);
	return content->target ? 0 : no_memory(cursor);
}

int tree_content_find(struct tree_content *content, struct cursor *cursor, uint64_t inode,
		      const struct tree_entry *entry)
{
	struct key first = { inode, KEY_EXTENT_DATA, 0 };
	uint64_t end = 0;
	int ret = cursor_seek(cursor, &first);

	content->region_count = 0;
	free(content->target);
	content->target = NULL;
	if (S_ISLNK(entry->mode))
		return take_target(content, cursor, inode, entry, ret);
	for (; (ret = is_extent(cursor, inode, ret)) > 0; ret = cursor_next(cursor)) {
		struct piece piece;
		int err = check_piece(cursor, &piece);

		if (!err && piece.offset < end)
			err = cursor_fail(cursor, "the extent before it ends at %" PRIu64, end);
		if (err)
			return err;
		end = piece.offset + piece.bytes;
		if (piece.is_hole || piece.offset >= entry->bytes)
			continue;
		if (piece.bytes > entry->bytes - piece.offset)
			piece.bytes = entry->bytes - piece.offset;
		err = add_region(content, cursor, piece.offset, piece.bytes);
		if (err)
			return err;
	}
	return ret;
}

/* What the compressed bytes lack of the extent are zeroes, as kernels have it. */
static int unpack(struct tree_content *content, struct cursor *cursor, const void *packed,
		  size_t packed_bytes, const struct piece *piece)
{
	ZSTD_inBuffer in = { packed, packed_bytes, 0 };
	ZSTD_outBuffer out = { content->raw, piece->ram_bytes, 0 };
	size_t ret = 1;

	ZSTD_DCtx_reset(content->zstd, ZSTD_reset_session_only);
	while (ret && out.pos < out.size && in.pos < in.size) {
		ret = ZSTD_decompressStream(content->zstd, &out, &in);
		if (ZSTD_isError(ret))
			return cursor_fail(cursor, "it is no valid zstd: %s",
					   ZSTD_getErrorName(ret));
	}
	memset(content->raw + out.pos, 0, out.size - out.pos);
	return 0;
}

static int read_at(struct cursor *cursor, uint64_t logical, void *data, size_t bytes)
{
	const struct chunk *chunk = reader_map(cursor->reader, logical, bytes);

	if (!chunk)
		return -EUCLEAN;
	if (!(chunk->type & CHUNK_DATA))
		return cursor_fail(cursor, "%" PRIu64 " is no place of data", logical);
	return reader_pread(cursor->reader, "an extent", data, bytes,
			    chunk->stripes[0] + (logical - chunk->logical));
}

/* `bytes` are those that the file has of the piece. */
static int read_piece(struct tree_content *content, struct cursor *cursor,
		      const struct piece *piece, uint64_t bytes, struct tree_visitor *visitor,
		      bool *is_visitors)
{
	uint64_t place = piece->disk_bytenr + piece->extent_offset;
	int ret = 0;

	if (piece->is_inline && !piece->is_packed) {
		*is_visitors = true;
		return visitor->data(visitor, piece->offset, piece->inline_data, bytes);
	}
	ret = make_room(content, cursor);
	if (!ret && piece->is_packed) {
		if (piece->is_inline)
			ret = unpack(content, cursor, piece->inline_data, piece->inline_bytes,
				     piece);
		else
			ret = read_at(cursor, piece->disk_bytenr, content->packed,
				      piece->disk_bytes);
		if (!ret && !piece->is_inline)
			ret = unpack(content, cursor, content->packed, piece->disk_bytes, piece);
		if (ret)
			return ret;
		*is_visitors = true;
		return visitor->data(visitor, piece->offset, content->raw + piece->extent_offset,
				     bytes);
	}
	for (uint64_t at = 0; !ret && at < bytes;) {
		size_t part = bytes - at < READ_BYTES ? bytes - at : READ_BYTES;

		ret = read_at(cursor, place + at, content->raw, part);
		if (ret)
			return ret;
		ret = visitor->data(visitor, piece->offset + at, content->raw, part);
		*is_visitors = ret != 0;
		at += part;
	}
	return ret;
}

static int report_extent(const struct piece *piece, uint64_t bytes, const struct tree_entry *entry,
			 struct tree_visitor *visitor, bool *is_visitors)
{
	const struct tree_extent extent = {
		.offset = piece->offset,
		.bytes = bytes,
		.logical = piece->disk_bytenr,
		.stored_bytes = piece->disk_bytes,
		.begin = piece->extent_offset,
		.is_compressed = piece->is_packed,
	};

	*is_visitors = true;
	return visitor->extent(visitor, entry, &extent);
}

int tree_content_read(struct tree_content *content, struct cursor *cursor, uint64_t inode,
		      const struct tree_entry *entry, struct tree_visitor *visitor,
		      bool *is_visitors)
{
	struct key first = { inode, KEY_EXTENT_DATA, 0 };
	int ret = cursor_seek(cursor, &first);

	for (; (ret = is_extent(cursor, inode, ret)) > 0; ret = cursor_next(cursor)) {
		struct piece piece;
		uint64_t bytes;
		int err = check_piece(cursor, &piece);

		if (err)
			return err;
		if (piece.is_hole || piece.offset >= entry->bytes)
			continue;
		bytes = entry->bytes - piece.offset;
		if (bytes > piece.bytes)
			bytes = piece.bytes;
		if (visitor->extent && !piece.is_inline)
			err = report_extent(&piece, bytes, entry, visitor, is_visitors);
		else if (visitor->data)
			err = read_piece(content, cursor, &piece, bytes, visitor, is_visitors);
		if (err)
			return err;
		*is_visitors = false;
	}
	return ret;
}
