/* SPDX-License-Identifier: MIT */
/*
 * A segment is a range of the device that one kind answers. A kind is one file in segment/ that
 * ends in SEGMENT_KIND(ops); only the list of sources in meson.build names it.
 */
#pragma once

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/error.h"
#include "server/io.h"

struct engine;
struct segment_ops;

struct segment {
	const struct segment_ops *ops;
	uint64_t offset; /* bytes, from the start of the device */
	uint64_t length; /* bytes */
	unsigned index;
	unsigned kind; /* index in engine->kinds */
	void *private; /* ops->private_bytes, zeroed */
};

/* Returned instead of 0 or a negative errno: the operation completes later. */
#define PART_PENDING 1

struct segment_ops {
	const char *name;
	size_t private_bytes;
	bool waits; /* it waits for other machines, so many requests should be possible at a time */

	/*
	 * Takes the kind's own keys out of the JSON object (base/keys.h). Returns 0, or a negative
	 * errno with the error filled in. NULL: there are no keys.
	 */
	int (*parse)(struct segment *segment, json_t *keys, struct error *error);

	/* Opens and checks what is needed; gives a message on failure. May be NULL. */
	int (*open)(struct engine *engine, struct segment *segment);
	void (*close)(struct segment *segment);

	/*
	 * Instead of `read`, for a segment that is one byte repeated: returns that byte. The engine
	 * fills the buffer, or leaves it when it has the right content.
	 */
	uint8_t (*uniform_byte)(const struct segment *segment);

	/*
	 * Each answers io->part and returns 0, a negative errno or PART_PENDING. A read fills the
	 * whole part or fails: the kernel would pass on what the buffer held before. Writes,
	 * discards and write_zeroes fail where the function is NULL; a flush then has nothing to
	 * do.
	 */
	int (*read)(struct segment *segment, struct io *io);
	int (*write)(struct segment *segment, struct io *io);
	int (*flush)(struct segment *segment, struct io *io);
	int (*discard)(struct segment *segment, struct io *io);
	int (*write_zeroes)(struct segment *segment, struct io *io);

	/*
	 * Gets the CQE of an SQE of this kind, or the result of worker_answer(). Returns the same
	 * values; PART_PENDING: another one will come.
	 */
	int (*complete)(struct segment *segment, struct io *io, int cqe_result);

	/* See engine_abandon(). NULL: this kind never waits for long. */
	void (*abandon)(struct segment *segment);

	/*
	 * Called once, for the first segment of the kind. Adds a key of its own to the reply to a
	 * stats request. Returns 0 or -ENOMEM. May be NULL.
	 */
	int (*add_stats)(const struct segment *segment, json_t *stats);
};

/* Adds a kind to an array made by the linker; see segment_kind_find(). */
#define SEGMENT_KIND(ops)                                  \
	static const struct segment_ops *const ops##_entry \
		__attribute__((used, section("segment_kinds"))) = &ops
