/* SPDX-License-Identifier: MIT */
/* What btrfs-ublk-mkimage is asked to do: JSON on standard input. */
#pragma once

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/error.h"
#include "btrfs/csum.h"
#include "image/first.h"
#include "image/source.h"

#define MKIMAGE_PROGRAM "btrfs-ublk-mkimage"

struct layer {
	source_read *read;
	struct source_options options;
	char *name; /* of its subvolume; NULL: its chain ID */
	bool is_tar;
	uint8_t diff_id[DIFF_ID_BYTES]; /* that it has to have */

	/* Outputs. */
	struct source_report report;
	uint64_t subvolume;
	uint64_t data_offset, data_bytes; /* in the data object */
	uint64_t first_origin, origins;	  /* only with `in_layers` */
	uint8_t chain_id[DIFF_ID_BYTES];
};

struct description {
	json_t *json; /* which strings are in */
	struct layer *layers;
	size_t layer_count;
	struct first_range *first;
	size_t first_count;
	const char *output;
	const char *label;
	int level; /* of zstd, or 0 */
	uint32_t max_inline;
	uint32_t unit_bytes;
	unsigned threads;
	int64_t time_s;
	const struct csum_kind *csum;
	bool in_layers; /* content stays in the layers, which are tars */
};

/* Reads all of the stream. Returns 0 or a negative errno, with an error. */
int description_read(struct description *description, FILE *stream, struct error *error);
void description_deinit(struct description *description);

enum { DIGEST_TEXT_BYTES = sizeof("sha256:") + 2 * (size_t)DIFF_ID_BYTES };

/* Writes "sha256:…". */
const char *digest_format(const uint8_t digest[DIFF_ID_BYTES], char text[static DIGEST_TEXT_BYTES]);
