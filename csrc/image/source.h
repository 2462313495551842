/* SPDX-License-Identifier: MIT */
/*
 * What a tree comes from. A source reads one layer into a model and hands the content of its files
 * to a sink. What it refuses it names; the model is of no use any more then.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "base/error.h"
#include "image/content.h"
#include "image/model.h"

enum { DIFF_ID_BYTES = 32 };

struct source_options {
	const char *path;
	/* Of a tar: whether it is a layer of an OCI image, which may remove what is below. */
	bool is_oci_layer;
	/* Of a tar: the SHA-256 that it has to have uncompressed; NULL: any. */
	const uint8_t *diff_id;
	/* Of a tar: how many bytes it may have uncompressed; 0: what an honest one has. */
	uint64_t stream_bytes_max;
	/* Of directories that nothing describes. */
	int64_t time_s;
};

struct source_report {
	uint64_t entries;
	uint64_t stream_bytes;		/* of a tar, uncompressed */
	uint8_t diff_id[DIFF_ID_BYTES]; /* of a tar */
};

/* Returns 0 or a negative errno, with an error. `report` is filled by then. */
typedef int source_read(struct model *model, struct content_sink *sink,
			const struct source_options *options, struct source_report *report,
			struct error *error);

/* A directory, with all below it, also on other file systems that are mounted there. */
source_read source_read_directory;
/* A tar: plain, or compressed by gzip, zstd or xz. */
source_read source_read_tar;

/* Whether images have attributes of this name; others are of the file system they come from. */
bool source_keeps_attribute(const char *name);

/* Puts what the error is about in front of its text, and returns `err`. */
int source_error_at(struct error *error, int err, const char *what);
