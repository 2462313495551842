/* SPDX-License-Identifier: MIT */
/*
 * Content of files to extents. A source hands content to the sink; it becomes inline content in a
 * spool, or pieces that are compressed by a pool of threads and placed in the data object in the
 * order in which they came, each content once. The result does not depend on the threads.
 *
 * Only the thread that calls these functions touches the model.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/error.h"
#include "btrfs/csum.h"
#include "image/content.h"
#include "image/first.h"
#include "image/model.h"

enum {
	DATA_INLINE_BYTES_MAX = 4095, /* kernels want less than a sector */
	DATA_THREADS_MAX = 256,
	DATA_DIGEST_BYTES = 32,
};

struct data_params {
	int fd;		       /* of the data object: empty, stays the caller's */
	const char *directory; /* where spools are made, without names */
	int level;	       /* of zstd, or 0: no compression */
	uint32_t max_inline;
	uint32_t unit_bytes; /* of the digests */
	unsigned threads;
	const struct csum_kind *csum;
	/*
	 * All content comes from tars, and stays there: nothing is written to `fd`, and `level` is
	 * 0. Each layer begins at a unit; what one unit needs of a tar has a bound.
	 */
	bool in_layers;
};

/* Where bytes of the data object lie in a tar, uncompressed. */
struct data_origin {
	uint64_t object_offset, offset, bytes;
};

/* What nothing lies in, in the order of offsets. */
struct data_gap {
	uint64_t offset, bytes;
};

struct data_counts {
	uint64_t object_bytes;	/* of the data object */
	uint64_t first_bytes;	/* at its front, which were to come first */
	uint64_t extents;	/* in it */
	uint64_t compressed;	/* extents */
	uint64_t content_bytes; /* of files, without holes */
	uint64_t inline_files;
	uint64_t inline_bytes; /* as stored */
	uint64_t shared;       /* pieces that were there already */
	uint64_t shared_bytes; /* of content */
	uint64_t digests;
	uint64_t origins; /* only with `in_layers` */
};

struct data;

int data_open(struct data **data, const struct data_params *params, struct model *model,
	      struct error *error);
void data_close(struct data *data); /* may be NULL */

struct content_sink *data_sink(struct data *data);

/*
 * Until data_place_first(), content of files only goes to `first`: nothing is placed, and the
 * model, in which the sources put the files, gets no extents.
 */
void data_collect(struct data *data, struct first *first, const struct model *model);
/* Places what was collected. All content that comes now lies behind it. */
int data_place_first(struct data *data, struct error *error);

/* Places all pieces: then the model has the extents of all files that were handed on. */
int data_drain(struct data *data, struct error *error);

/* Has what comes now begin at a unit, after data_drain(). Only with `in_layers`. */
int data_end_layer(struct data *data, struct error *error);

/*
 * Computes the digest of the last unit. Nothing may be handed on afterwards. -EAGAIN: content that
 * was to come first is in no file.
 */
int data_finish(struct data *data, struct error *error);

/* Computes a digest of all content that has been placed. Returns 0 or a negative errno. */
int data_digest(const struct data *data, uint8_t digest[DATA_DIGEST_BYTES]);

const struct data_counts *data_counts(const struct data *data);

/* Read what the spools have; each returns 0 or a negative errno. */
int data_read_inline(struct data *data, uint64_t offset, void *bytes, size_t length);
int data_read_csums(struct data *data, uint64_t first_sector, void *csums, size_t bytes);
int data_read_digests(struct data *data, uint64_t first, void *digests, size_t bytes);
/* Those of each layer are in the order of both their offsets. */
int data_read_origins(struct data *data, uint64_t first, struct data_origin *origins, size_t count);
const struct data_gap *data_gaps(const struct data *data, size_t *count);
