/* SPDX-License-Identifier: MIT */
/*
 * Which bytes of a decoded object a source consists of, and where they lie: the content of files in
 * a tar, each at a multiple of 4 KiB. It is a file that btrfs-ublk-mkimage makes, and that a map
 * keeps:
 *
 *   struct selection_header, struct selection_unit for each unit, struct selection_piece for each
 *   piece, one unit after the other.
 *
 * All numbers are little-endian. Each value is checked before it is used.
 */
#pragma once

#include <assert.h>
#include <stdint.h>

#include "base/error.h"
#include "content/codec.h"

#define SELECTION_MAGIC "BUselec"

enum {
	SELECTION_VERSION = 1,
	SELECTION_UNIT_MIN_BYTES = 4 << 10,
	SELECTION_UNIT_MAX_BYTES = 1 << 20,
	SELECTION_UNITS_MAX = 1 << 22,
	SELECTION_PIECES_MAX = 1 << 17, /* of one unit */
	SELECTION_BYTES_MAX = 256 << 20,
	/* How far apart, in the decoded object, the bytes of one unit may lie. */
	SELECTION_SPAN_MAX = 4 << 20,
};

struct selection_header {
	char magic[8];
	uint32_t version;
	uint32_t unit_bytes;
	uint64_t units;		/* whole ones, of the source */
	uint64_t decoded_bytes; /* of the object */
	uint64_t pieces;	/* of all units */
} __attribute__((packed));
static_assert(sizeof(struct selection_header) == 40, "in files");

struct selection_unit {
	uint64_t offset; /* in the decoded object: where its first byte comes from */
	uint32_t length; /* up to its last byte */
	uint32_t pieces;
} __attribute__((packed));
static_assert(sizeof(struct selection_unit) == 16, "in files");

/* In the order of their places, which is that of the decoded object. What lies between is zeroes. */
struct selection_piece {
	uint32_t place; /* in the unit */
	uint32_t skip;	/* bytes of the decoded object behind the piece before */
	uint32_t length;
} __attribute__((packed));
static_assert(sizeof(struct selection_piece) == 12, "in files");

/* Immutable once it is made; numbers of this machine. */
struct selection {
	uint32_t unit_bytes;
	uint64_t count, decoded_bytes, pieces;
	struct selection_unit units[];
};

/* How many bytes the header and the units take. */
static inline uint64_t selection_head_bytes(uint64_t units)
{
	return sizeof(struct selection_header) + units * sizeof(struct selection_unit);
}

/*
 * Makes a selection from the head of its file, and checks it. Returns 0, or -EINVAL or -ENOMEM with
 * the error filled in. The caller frees it.
 */
int selection_parse(const uint8_t *head, uint64_t bytes, struct selection **selection,
		    struct error *error);
/* Checks that no unit needs too much of the object, which has that index. */
int selection_check(const struct selection *selection, const struct codec_index *index,
		    struct error *error);
/*
 * Which range of the object whole units of a source need: [offset, offset + length) of what is
 * read. `selection` may be NULL. The range's length is UINT32_MAX where too much has to be decoded.
 */
void selection_plan(const struct selection *selection, const struct codec_index *index,
		    uint64_t offset, uint32_t length, struct coded_range *range);
/*
 * Makes the parts of a unit for codec_decode(): as many as the unit has `pieces`, which take `bytes`.
 * The unit belongs at `data`, and in the decoded object it begins `gap` bytes behind what the parts
 * before it need. Returns 0 or -EUCLEAN.
 */
int selection_parts(const struct selection *selection, uint64_t unit, const void *pieces,
		    size_t bytes, uint32_t gap, uint8_t *data, struct codec_part *parts);
