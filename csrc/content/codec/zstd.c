/* SPDX-License-Identifier: MIT */
/*
 * Zstandard (RFC 8878), of many frames: decoding may begin at each. The seekable format is one
 * of them, with a table at its end, which is then believed (and checked when units are decoded).
 * https://github.com/facebook/zstd/blob/dev/contrib/seekable_format/zstd_seekable_compression_format.md
 */
#include <endian.h>
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <zstd.h>
#include <zstd_errors.h>

#include "base/cleanup.h"
#include "content/codec.h"

enum {
	SKIPPABLE_MAGIC = 0x184d2a50, /* the lowest 4 bits may be anything */
	SKIPPABLE_HEADER_BYTES = 8,
	TABLE_MAGIC = 0x184d2a5e,
	TABLE_FOOTER_BYTES = 9,
	WINDOW_LOG_MAX = 24, /* CODEC_SPAN_MAX */
};
#define FOOTER_MAGIC 0x8f92eab1u

struct zstd_state {
	ZSTD_DCtx *context;
};

static uint32_t read_u32(const uint8_t *at)
{
	uint32_t number;

	memcpy(&number, at, sizeof(number));
	return le32toh(number);
}

static int too_many(struct error *error, int err)
{
	return err == -E2BIG ? error_set(error, err, "the object has more than %d frames",
					 CODEC_POINTS_MAX) :
			       error_set(error, err, "no memory for an index");
}

/* The next frame has `coded` bytes, and decodes to `bytes`. */
static int add_frame(struct codec_scan *scan, uint64_t *at, uint64_t coded, uint64_t bytes,
		     struct error *error)
{
	int err = 0;

	if (bytes > CODEC_SPAN_MAX) {
		error_set_hint(error, "compress it in frames, such as of 256 KiB");
		return error_set(error, -EFBIG,
				 "the frame at %" PRIu64 " has %" PRIu64
				 " bytes; a read would decode them all, so at most %d are taken",
				 *at, bytes, CODEC_SPAN_MAX);
	}
	if (bytes)
		err = codec_scan_add(scan, scan->size, *at * 8, NULL, 0);
	scan->size += bytes;
	*at += coded;
	return err ? too_many(error, err) : 0;
}

/* Returns the table's first entry and the sizes, or NULL where there is none. */
static const uint8_t *find_table(const struct codec_scan *scan, uint64_t *frames,
				 unsigned *entry_bytes, uint64_t *table_at)
{
	const uint8_t *footer;
	uint64_t bytes;

	if (scan->coded_bytes < TABLE_FOOTER_BYTES + SKIPPABLE_HEADER_BYTES)
		return NULL;
	footer = scan->coded + scan->coded_bytes - TABLE_FOOTER_BYTES;
	/* Bits 2 to 6 are reserved. */
	if (read_u32(footer + 5) != FOOTER_MAGIC || footer[4] & 0x7c)
		return NULL;
	*frames = read_u32(footer);
	*entry_bytes = footer[4] & 0x80 ? 12 : 8;
	bytes = *frames * *entry_bytes + TABLE_FOOTER_BYTES;
	if (bytes > scan->coded_bytes - SKIPPABLE_HEADER_BYTES)
		return NULL;
	*table_at = scan->coded_bytes - SKIPPABLE_HEADER_BYTES - bytes;
	if (read_u32(scan->coded + *table_at) != TABLE_MAGIC ||
	    read_u32(scan->coded + *table_at + 4) != bytes)
		return NULL;
	return scan->coded + *table_at + SKIPPABLE_HEADER_BYTES;
}

static int index_table(struct codec_scan *scan, const uint8_t *entry, uint64_t frames,
		       unsigned entry_bytes, uint64_t table_at, struct error *error)
{
	uint64_t at = 0;

	for (uint64_t i = 0; i < frames; i++, entry += entry_bytes) {
		int err = add_frame(scan, &at, read_u32(entry), read_u32(entry + 4), error);

		if (err)
			return err;
		if (at > table_at || !read_u32(entry))
			break;
	}
	scan->coded_end = at;
	return at == table_at ? 0 :
				error_set(error, -EINVAL,
					  "its table of frames is damaged: they end at %" PRIu64
					  ", and the table begins at %" PRIu64,
					  at, table_at);
}

/* How many bytes a frame has that does not say so. */
static int count_bytes(const uint8_t *frame, size_t coded, uint64_t *bytes, struct error *error)
{
	_cleanup_free_ uint8_t *scratch = malloc(ZSTD_DStreamOutSize());
	ZSTD_DCtx *context = ZSTD_createDCtx();
	ZSTD_inBuffer in = { frame, coded, 0 };
	size_t left = scratch && context ? 1 : 0;

	*bytes = 0;
	/* What units cannot be decoded with is not to be indexed. */
	if (context)
		ZSTD_DCtx_setParameter(context, ZSTD_d_windowLogMax, WINDOW_LOG_MAX);
	while (left && *bytes <= CODEC_SPAN_MAX) {
		ZSTD_outBuffer out = { scratch, ZSTD_DStreamOutSize(), 0 };
		size_t before = in.pos;

		left = ZSTD_decompressStream(context, &out, &in);
		if (ZSTD_isError(left) || (left && !out.pos && in.pos == before))
			break;
		*bytes += out.pos;
	}
	ZSTD_freeDCtx(context);
	if (!scratch || !context)
		return error_set(error, -ENOMEM, "no memory for an index");
	if (left && *bytes <= CODEC_SPAN_MAX)
		return error_set(error, -EBADMSG, "a frame cannot be decoded: %s",
				 ZSTD_isError(left) ? ZSTD_getErrorName(left) : "it is cut");
	return 0;
}

static int index_frames(struct codec_scan *scan, struct error *error)
{
	uint64_t at = 0;
	int err = 0;

	while (!err && at < scan->coded_bytes) {
		const uint8_t *frame = scan->coded + at;
		size_t rest = scan->coded_bytes - at;
		size_t coded = ZSTD_findFrameCompressedSize(frame, rest);
		unsigned long long bytes;

		if (ZSTD_isError(coded))
			return error_set(error, -EBADMSG, "no frame of zstd at %" PRIu64 ": %s", at,
					 ZSTD_getErrorName(coded));
		bytes = ZSTD_getFrameContentSize(frame, rest);
		if (bytes == ZSTD_CONTENTSIZE_ERROR)
			return error_set(error, -EBADMSG, "no frame of zstd at %" PRIu64, at);
		if (bytes == ZSTD_CONTENTSIZE_UNKNOWN) {
			uint64_t counted;

			err = count_bytes(frame, coded, &counted, error);
			bytes = counted;
		}
		if (!err)
			err = add_frame(scan, &at, coded, bytes, error);
	}
	scan->coded_end = at;
	return err;
}

static int zstd_index(struct codec_scan *scan, struct error *error)
{
	unsigned entry_bytes = 0;
	uint64_t frames = 0, table_at = 0;
	const uint8_t *table = find_table(scan, &frames, &entry_bytes, &table_at);

	return table ? index_table(scan, table, frames, entry_bytes, table_at, error) :
		       index_frames(scan, error);
}

static int zstd_begin(void *state, uint8_t bit, const uint8_t *window, uint32_t window_bytes)
{
	struct zstd_state *zstd = state;

	(void)bit, (void)window, (void)window_bytes;
	zstd->context = ZSTD_createDCtx();
	if (!zstd->context)
		return -ENOMEM;
	ZSTD_DCtx_setParameter(zstd->context, ZSTD_d_windowLogMax, WINDOW_LOG_MAX);
	return 0;
}

static int zstd_feed(void *state, struct codec_io *io)
{
	struct zstd_state *zstd = state;
	ZSTD_inBuffer in = { io->in, io->in_bytes, 0 };
	ZSTD_outBuffer out = { io->out, io->out_bytes, 0 };
	size_t left = ZSTD_decompressStream(zstd->context, &out, &in);

	if (ZSTD_isError(left))
		return ZSTD_getErrorCode(left) == ZSTD_error_memory_allocation ? -ENOMEM : -EBADMSG;
	io->in += in.pos;
	io->in_bytes -= in.pos;
	io->out += out.pos;
	io->out_bytes -= out.pos;
	return 0;
}

static void zstd_end(void *state)
{
	struct zstd_state *zstd = state;

	ZSTD_freeDCtx(zstd->context);
}

static const struct codec_ops zstd_ops = {
	.name = "zstd",
	.state_bytes = sizeof(struct zstd_state),
	.index = zstd_index,
	.begin = zstd_begin,
	.feed = zstd_feed,
	.end = zstd_end,
};
CODEC_KIND(zstd_ops);
