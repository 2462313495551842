/* SPDX-License-Identifier: MIT */
/*
 * Codecs: what is between the bytes of an object, as mirrors send them, and the bytes of a source,
 * as they are read. A codec is one file in content/codec/ that ends in CODEC_KIND(ops). A source
 * without one is read as it is.
 *
 * What is decoded comes from the network, before anything has verified it.
 */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "content/codec_index.h"

/* Input and output of one step, both bounded; feed() moves them on. */
struct codec_io {
	const uint8_t *in;
	size_t in_bytes;
	uint8_t *out;
	size_t out_bytes;
};

/* An index that is being made from the object, whose bytes are all in `coded`. */
struct codec_scan {
	const uint8_t *coded;
	uint64_t coded_bytes;
	uint32_t spacing;   /* how far apart points shall be, where the format lets us choose */
	uint64_t size;	    /* output: how many bytes come out */
	uint64_t coded_end; /* output: what is behind that is not needed */

	/* Internal. */
	struct codec_index_point *points;
	uint64_t count, room;
	uint8_t *windows;
	uint64_t windows_bytes, windows_room;
};

struct codec_ops {
	const char *name;
	size_t state_bytes;
	bool has_windows; /* points may lie within what depends on what came before */
	/*
	 * Finds the points of an object with codec_scan_add(), and its size. Returns 0, or a
	 * negative errno with the error filled in.
	 */
	int (*index)(struct codec_scan *scan, struct error *error);
	/*
	 * Prepares to decode from bit `bit` of the first byte on. `window`, of `window_bytes`, is
	 * what came out before; with 0, the format's own header comes first. `state` is zeroed.
	 * Returns 0 or -ENOMEM.
	 */
	int (*begin)(void *state, uint8_t bit, const uint8_t *window, uint32_t window_bytes);
	/*
	 * Decodes, until input or output is used up. Returns 0, -EBADMSG when the input is wrong,
	 * or -ENOMEM.
	 */
	int (*feed)(void *state, struct codec_io *io);
	/* Also after a begin() that failed. */
	void (*end)(void *state);
};

/* Adds a kind to an array made by the linker; see codec_find(). */
#define CODEC_KIND(ops)                                  \
	static const struct codec_ops *const ops##_entry \
		__attribute__((used, section("codec_kinds"))) = &ops

const struct codec_ops *codec_find(const char *name);
/* Writes "gzip, zstd" to `text`. */
const char *codec_names(char *text, size_t bytes);

/*
 * Adds a point: the byte `offset` comes out where bit `coded_bit` of the object goes in. `window`
 * may be NULL. Returns 0, -E2BIG or -ENOMEM.
 */
int codec_scan_add(struct codec_scan *scan, uint64_t offset, uint64_t coded_bit,
		   const uint8_t *window, uint32_t window_bytes);
void codec_scan_free(struct codec_scan *scan);

/* Unpacks a window to CODEC_WINDOW_BYTES at most. Returns 0 or -EBADMSG. */
int codec_window_unpack(const uint8_t *packed, uint32_t packed_bytes,
			uint8_t window[static CODEC_WINDOW_BYTES], uint32_t *window_bytes);

/* Where bytes that come out belong, behind `skip` that belong nowhere. */
struct codec_part {
	uint32_t skip;
	uint32_t length;
	uint8_t *data;
};

/*
 * Decodes what codec_index_plan() has asked for, the range->length bytes of `coded`, into `parts`,
 * one behind the other. Returns 0; -EBADMSG when something else comes out than the index says; or
 * -ENOMEM.
 */
int codec_decode(const struct codec_ops *codec, const struct coded_range *range,
		 const uint8_t *window, uint32_t window_bytes, const uint8_t *coded,
		 const struct codec_part *parts, uint32_t count);
