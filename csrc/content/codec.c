/* SPDX-License-Identifier: MIT */
#include "content/codec.h"

#include <endian.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <zlib.h>

#include "base/cleanup.h"

/* What comes out before the first wanted byte goes here, in parts. */
enum { SCRATCH_BYTES = 64 << 10 };

extern const struct codec_ops *const __start_codec_kinds[];
extern const struct codec_ops *const __stop_codec_kinds[];

const struct codec_ops *codec_find(const char *name)
{
	for (const struct codec_ops *const *kind = __start_codec_kinds; kind < __stop_codec_kinds;
	     kind++) {
		if (!strcmp((*kind)->name, name))
			return *kind;
	}
	return NULL;
}

const char *codec_names(char *text, size_t bytes)
{
	size_t used = 0;

	*text = '\0';
	for (const struct codec_ops *const *kind = __start_codec_kinds;
	     kind < __stop_codec_kinds && used < bytes; kind++)
		used += (size_t)snprintf(text + used, bytes - used, "%s%s", used ? ", " : "",
					 (*kind)->name);
	return text;
}

/* Makes room for `more` bytes behind the first `used` of `data`. Returns NULL without memory. */
static void *grow(void *data, uint64_t used, uint64_t more, uint64_t *room)
{
	uint64_t wanted = *room ?: 64 << 10;
	void *grown;

	if (used + more <= *room)
		return data;
	while (wanted < used + more)
		wanted *= 2;
	grown = realloc(data, wanted);
	if (grown)
		*room = wanted;
	return grown;
}

static int pack_window(struct codec_scan *scan, const uint8_t *window, uint32_t window_bytes,
		       uint32_t *packed_bytes)
{
	uLongf packed = CODEC_WINDOW_PACKED_MAX;
	uint8_t *windows;

	if (scan->windows_bytes + packed > CODEC_INDEX_BYTES_MAX)
		return -E2BIG;
	windows = grow(scan->windows, scan->windows_bytes, packed, &scan->windows_room);
	if (!windows)
		return -ENOMEM;
	scan->windows = windows;
	if (compress2(scan->windows + scan->windows_bytes, &packed, window, window_bytes,
		      Z_BEST_COMPRESSION) != Z_OK)
		return -ENOMEM;
	scan->windows_bytes += packed;
	*packed_bytes = (uint32_t)packed;
	return 0;
}

int codec_scan_add(struct codec_scan *scan, uint64_t offset, uint64_t coded_bit,
		   const uint8_t *window, uint32_t window_bytes)
{
	struct codec_index_point *points;
	uint32_t packed_bytes = 0;
	int err = 0;

	if (scan->count == CODEC_POINTS_MAX)
		return -E2BIG;
	points = grow(scan->points, scan->count * sizeof(*points), sizeof(*points), &scan->room);
	if (!points)
		return -ENOMEM;
	scan->points = points;
	if (window_bytes)
		err = pack_window(scan, window, window_bytes, &packed_bytes);
	if (err)
		return err;
	scan->points[scan->count++] = (struct codec_index_point){
		.offset = htole64(offset),
		.coded_bit = htole64(coded_bit),
		.window_bytes = htole32(packed_bytes),
	};
	return 0;
}

void codec_scan_free(struct codec_scan *scan)
{
	free(scan->points);
	free(scan->windows);
}

int codec_window_unpack(const uint8_t *packed, uint32_t packed_bytes,
			uint8_t window[static CODEC_WINDOW_BYTES], uint32_t *window_bytes)
{
	uLongf bytes = CODEC_WINDOW_BYTES;

	if (uncompress(window, &bytes, packed, packed_bytes) != Z_OK || !bytes)
		return -EBADMSG;
	*window_bytes = (uint32_t)bytes;
	return 0;
}

struct decoding {
	const struct codec_ops *codec;
	void *state;
	struct codec_io io;
};

/* Fills `data`. A codec that neither takes nor gives anything has too little input. */
static int fill(struct decoding *decoding, uint8_t *data, size_t length)
{
	struct codec_io *io = &decoding->io;

	io->out = data;
	io->out_bytes = length;
	while (io->out_bytes) {
		size_t in_before = io->in_bytes, out_before = io->out_bytes;
		int err = decoding->codec->feed(decoding->state, io);

		if (err)
			return err;
		if (io->in_bytes == in_before && io->out_bytes == out_before)
			return -EBADMSG;
	}
	return 0;
}

/* Has the rest of the input decoded, such as checksums. Nothing may come out. */
static int finish(struct decoding *decoding, uint8_t *scratch)
{
	struct codec_io *io = &decoding->io;
	size_t before;

	io->out = scratch;
	io->out_bytes = 1;
	do {
		int err;

		before = io->in_bytes;
		err = decoding->codec->feed(decoding->state, io);
		if (err)
			return err;
		if (!io->out_bytes)
			return -EBADMSG;
	} while (io->in_bytes && io->in_bytes != before);
	return io->in_bytes ? -EBADMSG : 0;
}

static int pass_over(struct decoding *decoding, uint32_t skip, uint8_t *scratch)
{
	int err = 0;

	while (!err && skip) {
		uint32_t part = skip < SCRATCH_BYTES ? skip : SCRATCH_BYTES;

		err = fill(decoding, scratch, part);
		skip -= part;
	}
	return err;
}

static int decode(struct decoding *decoding, const struct coded_range *range,
		  const struct codec_part *parts, uint32_t count)
{
	_cleanup_free_ uint8_t *scratch = malloc(SCRATCH_BYTES);
	int err = scratch ? pass_over(decoding, range->skip, scratch) : -ENOMEM;

	for (uint32_t i = 0; i < count && !err; i++) {
		err = pass_over(decoding, parts[i].skip, scratch);
		if (!err)
			err = fill(decoding, parts[i].data, parts[i].length);
	}
	if (!err && range->ends_there)
		err = finish(decoding, scratch);
	return err;
}

int codec_decode(const struct codec_ops *codec, const struct coded_range *range,
		 const uint8_t *window, uint32_t window_bytes, const uint8_t *coded,
		 const struct codec_part *parts, uint32_t count)
{
	_cleanup_free_ void *state = calloc(1, codec->state_bytes);
	struct decoding decoding = {
		.codec = codec,
		.state = state,
		.io = { .in = coded, .in_bytes = range->length },
	};
	int err;

	if (!state)
		return -ENOMEM;
	err = codec->begin(state, range->bit, window, window_bytes);
	if (!err)
		err = decode(&decoding, range, parts, count);
	codec->end(state);
	return err;
}
