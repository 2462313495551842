/* SPDX-License-Identifier: MIT */
/*
 * gzip (RFC 1952), of one member or many. Decoding may begin at a member, or at a block within one,
 * given the 32 KiB that came out before: the method of zlib's examples/zran.c.
 */
#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <string.h>
#include <zlib.h>

#include "content/codec.h"

enum {
	GZIP_WINDOW_BITS = 15 + 16, /* with header and trailer */
	RAW_WINDOW_BITS = -15,
	TRAILER_BYTES = 8,
	MAGIC_FIRST = 0x1f,
	/* of z_stream's data_type, with Z_BLOCK */
	AT_BLOCK = 128,
	IN_LAST_BLOCK = 64,
	BITS_LEFT = 7,
};

struct gzip_state {
	z_stream stream;
	bool is_open;
	bool is_raw;	 /* within a member that it has not seen the header of */
	bool is_between; /* a member has ended, and nothing of the next was seen */
	uint8_t trailer; /* bytes of it to be skipped */
	uint8_t bit;	 /* of the first byte, until that has come; 0: none */
};

static int gzip_begin(void *state, uint8_t bit, const uint8_t *window, uint32_t window_bytes)
{
	struct gzip_state *gzip = state;

	gzip->is_raw = window_bytes;
	if (inflateInit2(&gzip->stream, gzip->is_raw ? RAW_WINDOW_BITS : GZIP_WINDOW_BITS) != Z_OK)
		return -ENOMEM;
	gzip->is_open = true;
	gzip->bit = bit;
	if (window_bytes && inflateSetDictionary(&gzip->stream, window, window_bytes) != Z_OK)
		return -ENOMEM;
	return 0;
}

/* Between members: the trailer that zlib does not know of, and what follows the last one. */
static int next_member(struct gzip_state *gzip, struct codec_io *io)
{
	while (gzip->trailer && io->in_bytes) {
		gzip->trailer--;
		io->in++;
		io->in_bytes--;
	}
	if (gzip->trailer || !io->in_bytes)
		return 0;
	if (*io->in != MAGIC_FIRST) {
		/* gzip(1) ignores it too; it is mostly padding. */
		io->in += io->in_bytes;
		io->in_bytes = 0;
		return 0;
	}
	gzip->is_between = false;
	gzip->is_raw = false;
	return inflateReset2(&gzip->stream, GZIP_WINDOW_BITS) == Z_OK ? 0 : -EBADMSG;
}

static int inflate_some(struct gzip_state *gzip, struct codec_io *io)
{
	z_stream *stream = &gzip->stream;
	int result;

	stream->next_in = (Bytef *)io->in; /* zlib does not write to it */
	stream->avail_in = io->in_bytes < UINT_MAX ? (uInt)io->in_bytes : UINT_MAX;
	stream->next_out = io->out;
	stream->avail_out = io->out_bytes < UINT_MAX ? (uInt)io->out_bytes : UINT_MAX;
	result = inflate(stream, Z_NO_FLUSH);
	io->in_bytes -= (size_t)(stream->next_in - io->in);
	io->out_bytes -= (size_t)(stream->next_out - io->out);
	io->in = stream->next_in;
	io->out = stream->next_out;
	if (result == Z_STREAM_END) {
		gzip->trailer = gzip->is_raw ? TRAILER_BYTES : 0;
		gzip->is_between = true;
	}
	if (result == Z_MEM_ERROR)
		return -ENOMEM;
	return result == Z_OK || result == Z_STREAM_END || result == Z_BUF_ERROR ? 0 : -EBADMSG;
}

static int gzip_feed(void *state, struct codec_io *io)
{
	struct gzip_state *gzip = state;

	if (gzip->bit && io->in_bytes) {
		if (inflatePrime(&gzip->stream, 8 - gzip->bit, *io->in >> gzip->bit) != Z_OK)
			return -EBADMSG;
		gzip->bit = 0;
		io->in++;
		io->in_bytes--;
	}
	while (io->in_bytes && gzip->is_between) {
		int err = next_member(gzip, io);

		if (err)
			return err;
	}
	return gzip->is_between ? 0 : inflate_some(gzip, io);
}

static void gzip_end(void *state)
{
	struct gzip_state *gzip = state;

	if (gzip->is_open)
		inflateEnd(&gzip->stream);
}

/* Goes through all of an object. */
struct gzip_scan {
	struct codec_scan *scan;
	z_stream stream;
	uint64_t last;				/* the offset of the last point */
	uint8_t output[2 * CODEC_WINDOW_BYTES]; /* what came out lately; see keep_window() */
	uint32_t kept;
	struct {
		uint8_t window[CODEC_WINDOW_BYTES], output[CODEC_WINDOW_BYTES];
	} real, inverse, low, high; /* see clear_unused() */
};

static uint64_t consumed(const struct gzip_scan *gzip)
{
	return (uint64_t)(gzip->stream.next_in - gzip->scan->coded);
}

/* Keeps the last 32 KiB of the output at its start. */
static void keep_window(struct gzip_scan *gzip)
{
	uint32_t bytes = (uint32_t)(gzip->stream.next_out - gzip->output);

	if (bytes > CODEC_WINDOW_BYTES) {
		memmove(gzip->output, gzip->output + bytes - CODEC_WINDOW_BYTES,
			CODEC_WINDOW_BYTES);
		bytes = CODEC_WINDOW_BYTES;
	}
	gzip->kept = bytes;
	gzip->stream.next_out = gzip->output + bytes;
	gzip->stream.avail_out = (uInt)(sizeof(gzip->output) - bytes);
}

/* Decodes what follows a point with another window. Returns how many bytes came out, or -errno. */
static ssize_t try_window(const struct codec_scan *scan, uint64_t coded_bit, const uint8_t *window,
			  uint32_t window_bytes, uint8_t output[static CODEC_WINDOW_BYTES])
{
	struct codec_io io = {
		.in = scan->coded + coded_bit / 8,
		.in_bytes = scan->coded_bytes - coded_bit / 8,
		.out = output,
		.out_bytes = CODEC_WINDOW_BYTES,
	};
	struct gzip_state gzip = {};
	int err = gzip_begin(&gzip, coded_bit % 8, window, window_bytes);
	size_t before;

	do {
		before = io.in_bytes + io.out_bytes;
		err = err ?: gzip_feed(&gzip, &io);
	} while (!err && io.out_bytes && io.in_bytes + io.out_bytes != before);
	gzip_end(&gzip);
	return err ?: (ssize_t)(CODEC_WINDOW_BYTES - io.out_bytes);
}

/*
 * Clears what nothing refers to in the window of a point, so that it becomes small. References reach
 * 32 KiB back, so all are in as much output. Which bytes of that come from the window shows an
 * inverted one, and from which place two windows that count.
 */
static const uint8_t *clear_unused(struct gzip_scan *gzip, uint64_t coded_bit)
{
	uint32_t bytes = gzip->kept;
	ssize_t got;

	for (uint32_t i = 0; i < bytes; i++) {
		gzip->inverse.window[i] = gzip->output[i] ^ 0xff;
		gzip->low.window[i] = (uint8_t)i;
		gzip->high.window[i] = (uint8_t)(i >> 8);
	}
	got = try_window(gzip->scan, coded_bit, gzip->output, bytes, gzip->real.output);
	/* What was not decoded may refer to all of it. */
	if (got < 0 ||
	    got != try_window(gzip->scan, coded_bit, gzip->inverse.window, bytes,
			      gzip->inverse.output) ||
	    got != try_window(gzip->scan, coded_bit, gzip->low.window, bytes, gzip->low.output) ||
	    got != try_window(gzip->scan, coded_bit, gzip->high.window, bytes, gzip->high.output))
		return gzip->output;
	memset(gzip->real.window, 0, bytes);
	for (ssize_t i = 0; i < got; i++) {
		unsigned place = (unsigned)gzip->high.output[i] << 8 | gzip->low.output[i];

		if (gzip->real.output[i] != gzip->inverse.output[i] && place < bytes)
			gzip->real.window[place] = gzip->output[place];
	}
	return gzip->real.window;
}

static int add_point(struct gzip_scan *gzip, uint64_t coded_bit, bool with_window,
		     struct error *error)
{
	struct codec_scan *scan = gzip->scan;
	const uint8_t *window = gzip->output;
	uint64_t size = scan->size;
	int err;

	if (size - gzip->last > CODEC_SPAN_MAX)
		return error_set(error, -EFBIG,
				 "%" PRIu64
				 " bytes come of one block of gzip; at most %d are taken",
				 size - gzip->last, CODEC_SPAN_MAX);
	if (with_window)
		window = clear_unused(gzip, coded_bit);
	err = codec_scan_add(scan, size, coded_bit, window, with_window ? gzip->kept : 0);
	gzip->last = size;
	if (err == -E2BIG)
		return error_set(error, err,
				 "the object needs more points than an index may have: space them "
				 "more widely");
	return err ? error_set(error, err, "no memory for an index") : 0;
}

/* Decodes up to the end of a block, or until the output is full. */
static int scan_some(struct gzip_scan *gzip, int *result, struct error *error)
{
	z_stream *stream = &gzip->stream;
	uint64_t rest = gzip->scan->coded_bytes - consumed(gzip);
	const uint8_t *before;
	uint64_t at;

	keep_window(gzip);
	stream->avail_in = rest < UINT_MAX ? (uInt)rest : UINT_MAX;
	before = stream->next_out;
	at = consumed(gzip);
	*result = inflate(stream, Z_BLOCK);
	gzip->scan->size += (uint64_t)(stream->next_out - before);
	if (*result == Z_MEM_ERROR)
		return error_set(error, -ENOMEM, "no memory for an index");
	if ((*result != Z_OK && *result != Z_STREAM_END && *result != Z_BUF_ERROR) ||
	    (*result != Z_STREAM_END && stream->next_out == before && consumed(gzip) == at &&
	     !stream->avail_in))
		return error_set(error, -EBADMSG,
				 "it cannot be decoded as gzip, at %" PRIu64 ": %s", consumed(gzip),
				 stream->msg ?: "it is cut");
	keep_window(gzip);
	return 0;
}

static bool is_far(const struct gzip_scan *gzip)
{
	return gzip->scan->size - gzip->last >= gzip->scan->spacing;
}

/* Goes through one member, up to the end of its trailer. */
static int scan_member(struct gzip_scan *gzip, struct error *error)
{
	const z_stream *stream = &gzip->stream;
	int result = Z_OK, err = 0;

	while (!err && result != Z_STREAM_END) {
		err = scan_some(gzip, &result, error);
		if (!err && result != Z_STREAM_END && stream->data_type & AT_BLOCK &&
		    !(stream->data_type & IN_LAST_BLOCK) && gzip->kept && is_far(gzip))
			err = add_point(gzip,
					consumed(gzip) * 8 -
						((unsigned)stream->data_type & BITS_LEFT),
					true, error);
	}
	return err;
}

static int scan_members(struct gzip_scan *gzip, struct error *error)
{
	struct codec_scan *scan = gzip->scan;
	int err = add_point(gzip, 0, false, error);

	while (!err) {
		err = scan_member(gzip, error);
		if (err || consumed(gzip) == scan->coded_bytes ||
		    scan->coded[consumed(gzip)] != MAGIC_FIRST)
			break;
		if (inflateReset(&gzip->stream) != Z_OK)
			return error_set(error, -EBADMSG, "it cannot be decoded as gzip");
		/* What comes out of a member needs nothing from before, so a point is cheap. */
		if (is_far(gzip))
			err = add_point(gzip, consumed(gzip) * 8, false, error);
	}
	return err;
}

static int gzip_index(struct codec_scan *scan, struct error *error)
{
	struct gzip_scan gzip = {
		.scan = scan,
		.stream = { .next_in = (Bytef *)scan->coded },
	};
	int err;

	gzip.stream.next_out = gzip.output;
	if (inflateInit2(&gzip.stream, GZIP_WINDOW_BITS) != Z_OK)
		return error_set(error, -ENOMEM, "no memory for an index");
	err = scan_members(&gzip, error);
	inflateEnd(&gzip.stream);
	scan->coded_end = consumed(&gzip);
	if (!err && scan->size - gzip.last > CODEC_SPAN_MAX)
		return error_set(error, -EFBIG,
				 "%" PRIu64
				 " bytes come of one block of gzip; at most %d are taken",
				 scan->size - gzip.last, CODEC_SPAN_MAX);
	return err;
}

static const struct codec_ops gzip_ops = {
	.name = "gzip",
	.state_bytes = sizeof(struct gzip_state),
	.has_windows = true,
	.index = gzip_index,
	.begin = gzip_begin,
	.feed = gzip_feed,
	.end = gzip_end,
};
CODEC_KIND(gzip_ops);
