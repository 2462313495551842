/* SPDX-License-Identifier: MIT */
/*
 * How a source hands on the content of regular files: one file after the other, each from its
 * beginning to its end, holes included. Bytes and holes together are as long as the inode's
 * `bytes`: a source refuses a file for which that does not hold. Empty files are not handed on.
 *
 * After an error, nothing more is called: the image is not made. Each returns 0 or a negative
 * errno, with an error.
 */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "base/error.h"

struct content_sink;

struct content_sink_ops {
	int (*begin)(struct content_sink *sink, uint32_t inode, uint64_t bytes,
		     struct error *error);
	/* `length` is not 0; the bytes are the caller's again afterwards. */
	int (*data)(struct content_sink *sink, const void *bytes, size_t length,
		    struct error *error);
	/* `length` is not 0. Several holes may follow each other, and begin and end anywhere. */
	int (*hole)(struct content_sink *sink, uint64_t length, struct error *error);
	int (*end)(struct content_sink *sink, struct error *error);
};

/* Put this into a structure of your own, and get at that with container_of(). */
struct content_sink {
	const struct content_sink_ops *ops;
	/* Of a tar: where the bytes that data() gets lie in it, uncompressed. */
	uint64_t offset;
};
