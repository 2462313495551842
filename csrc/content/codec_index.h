/* SPDX-License-Identifier: MIT */
/*
 * The index of a compressed object: at which points of it decoding may begin, and which bytes come
 * out there. It is a file that `btrfs-ublk map index` makes, and that a map keeps:
 *
 *   struct codec_index_header, struct codec_index_point for each point, the windows one after the
 *   other. A window is what came out before its point, at most 32 KiB, as a zlib stream.
 *
 * All numbers are little-endian. Each value is checked before it is used.
 */
#pragma once

#include <assert.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/error.h"
#include "base/size.h"

#define CODEC_INDEX_MAGIC "BUindex"

enum {
	CODEC_INDEX_VERSION = 1,
	CODEC_NAME_BYTES = 16,
	CODEC_POINTS_MAX = 1 << 20,
	CODEC_INDEX_BYTES_MAX = 256 << 20,
	CODEC_WINDOW_BYTES = 32 << 10,
	/* compressed; zlib adds at most this */
	CODEC_WINDOW_PACKED_MAX = CODEC_WINDOW_BYTES + 64,
	/* How far apart points may be, as the bytes are read: what is decoded for nothing. */
	CODEC_SPAN_MAX = 16 << 20,
	/* how many bytes of the object one unit may need */
	CODEC_CODED_MAX = 8 << 20,
};

struct codec_index_header {
	char magic[8];
	uint32_t version;
	uint32_t zero;
	char codec[CODEC_NAME_BYTES]; /* padded with zeroes */
	uint64_t size;		      /* bytes, as they are read */
	uint64_t coded_bytes;	      /* of the object */
	uint64_t coded_end;	      /* what is behind that in the object is not needed */
	uint64_t points;
	uint64_t windows_bytes; /* of all windows, compressed */
} __attribute__((packed));
static_assert(sizeof(struct codec_index_header) == 72, "in files");

struct codec_index_point {
	uint64_t offset;       /* of the byte that comes out first */
	uint64_t coded_bit;    /* in the object; a multiple of 8 where there is no window */
	uint32_t window_bytes; /* compressed; 0: what is coded begins here with its own header */
	uint32_t zero;
} __attribute__((packed));
static_assert(sizeof(struct codec_index_point) == 24, "in files");

struct codec_point {
	uint64_t offset;
	uint64_t coded_bit;
	uint32_t window_bytes;
};

/* Immutable once it is made. */
struct codec_index {
	char codec[CODEC_NAME_BYTES + 1];
	uint64_t size, coded_bytes, coded_end, windows_bytes;
	uint64_t count;
	struct codec_point points[];
};

/* What to fetch and how to begin, for some bytes as they are read. */
struct coded_range {
	uint64_t offset; /* in the object */
	uint32_t length;
	uint32_t skip;	 /* how many bytes come out before the first wanted one */
	uint64_t point;	 /* whose window is needed, if it has one */
	uint64_t behind; /* the point that it ends at; all there are: at the end */
	uint8_t bit;	 /* of the first byte */
	bool ends_there; /* nothing may come out behind the last wanted byte */
};

/* How many bytes the header and the points take. */
static inline uint64_t codec_index_head_bytes(uint64_t points)
{
	return sizeof(struct codec_index_header) + points * sizeof(struct codec_index_point);
}

/*
 * Makes an index from the head of its file, and checks it. Returns 0, or -EINVAL or -ENOMEM with the
 * error filled in. The caller frees it.
 */
int codec_index_parse(const uint8_t *head, uint64_t bytes, struct codec_index **index,
		      struct error *error);
/* Checks that no unit of that size needs too much of the object. */
int codec_index_check_units(const struct codec_index *index, uint32_t unit_bytes,
			    struct error *error);
/* Which range [offset, offset + length) needs. It lies within index->size. */
void codec_index_plan(const struct codec_index *index, uint64_t offset, uint32_t length,
		      struct coded_range *range);
/* How many bytes of a range belong to its first point, and how many to its last. */
uint32_t codec_index_first_bytes(const struct codec_index *index, const struct coded_range *range);
uint32_t codec_index_last_bytes(const struct codec_index *index, const struct coded_range *range);
