/* SPDX-License-Identifier: MIT */
/*
 * Pieces of content on their way to the data object. One thread fills them and takes them back in
 * the same order; a pool of threads computes, meanwhile, what placing them needs.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "btrfs/csum.h"
#include "image/shares.h"

enum {
	PIECE_COMPRESSED_BYTES = 128 << 10, /* what kernels unpack at once */
	PIECE_PLAIN_BYTES = 1 << 20,
};

/* Where bytes of a piece come from: a tar, uncompressed. */
struct piece_origin {
	uint32_t place, bytes; /* in the piece */
	uint64_t offset;       /* in the tar */
};

struct piece {
	/* Inputs. */
	uint8_t *raw;
	uint32_t bytes; /* whole sectors */
	uint32_t inode;
	uint64_t file_offset;
	bool comes_first;
	struct piece_origin *origins; /* only where somebody asks for them */
	unsigned origin_count;
	size_t origin_room;

	/* Outputs. */
	int error; /* 0 or a negative errno */
	uint8_t digest[SHARE_DIGEST_BYTES];
	bool is_stored;	       /* the rest is set: the content was not in the object by then */
	const uint8_t *stored; /* what goes to the object */
	uint32_t stored_bytes;
	uint8_t compression; /* COMPRESSION_* */
	uint8_t *csums;	     /* of `stored` */

	uint8_t *packed;
	bool is_done;
};

struct pieces_params {
	uint32_t piece_bytes;
	int level; /* of zstd, or 0 */
	unsigned threads;
	const struct csum_kind *csum;
	const struct shares *shares; /* what they have need not be compressed */
};

struct pieces;

/* Returns 0 or a negative errno. */
int pieces_open(struct pieces **pieces, const struct pieces_params *params);
void pieces_close(struct pieces *pieces); /* may be NULL */

/* Returns the piece to fill next, or NULL: the oldest one has to be taken first. */
struct piece *pieces_next(struct pieces *pieces);
/* Hands it to the threads. */
void pieces_submit(struct pieces *pieces);

/* Returns the oldest submitted piece once it is done, or NULL: there is none. */
struct piece *pieces_oldest(struct pieces *pieces);
void pieces_release(struct pieces *pieces);

/* Fills in what is missing where !is_stored, on the calling thread, which fills the pieces. */
int pieces_store(struct pieces *pieces, struct piece *piece);
