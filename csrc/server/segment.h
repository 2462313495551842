/* SPDX-License-Identifier: MIT */
/*
 * A segment: a range of the device that one kind answers. A kind is one file in segment/ that ends
 * in SEGMENT_KIND(ops); nothing else has to name it but the list of sources in meson.build.
 */
#ifndef SERVER_SEGMENT_H
#define SERVER_SEGMENT_H

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>

#include "server/engine.h"

struct segment_ops;

struct segment {
	const struct segment_ops *ops;
	uint64_t offset; /* bytes, device */
	uint64_t length; /* bytes */
	unsigned index;
	unsigned kind; /* index in engine->kinds */
	void *private; /* ops->private_bytes, zeroed */
};

/* What an operation returns besides 0 and a negative errno: it completes later. */
#define PART_PENDING 1

struct segment_ops {
	const char *name;
	size_t private_bytes;
	bool waits; /* for other machines: many requests are to be possible at a time */

	/*
	 * Take the kind's own keys out of the JSON object with description_take_*(). Returns 0, or
	 * -EINVAL with a message given. NULL: no keys.
	 */
	int (*parse)(struct segment *segment, json_t *keys);

	/* Acquire and check; a message is given on failure. NULL: nothing to acquire. */
	int (*open)(struct engine *engine, struct segment *segment);
	void (*close)(struct segment *segment);

	/*
	 * Instead of `read`, where all of the segment is one byte repeated: that byte. The engine
	 * fills the buffer, or leaves it as it is where that is what it holds.
	 */
	uint8_t (*uniform_byte)(const struct segment *segment);

	/*
	 * Each answers io->part and returns 0, a negative errno or PART_PENDING. A read fills the
	 * whole part or fails: the kernel would hand out what the buffer held before. A missing
	 * write, discard or write_zeroes fails; a missing flush has nothing to flush.
	 */
	int (*read)(struct segment *segment, struct io *io);
	int (*write)(struct segment *segment, struct io *io);
	int (*flush)(struct segment *segment, struct io *io);
	int (*discard)(struct segment *segment, struct io *io);
	int (*write_zeroes)(struct segment *segment, struct io *io);

	/*
	 * The CQE of an SQE of this kind, or the result of worker_answer(); returns as above
	 * (PART_PENDING: another one is to come).
	 */
	int (*complete)(struct segment *segment, struct io *io, int cqe_result);

	/* See engine_abandon(). NULL: nothing of this kind waits for long. */
	void (*abandon)(struct segment *segment);

	/*
	 * Called once for the first segment of the kind: adds to the reply to a stats request, under
	 * a key of its own. Returns 0 or -ENOMEM. NULL: there is nothing to add.
	 */
	int (*add_stats)(const struct segment *segment, json_t *stats);
};

/* Linked into one array; see segment_kind_find(). */
#define SEGMENT_KIND(ops)                                  \
	static const struct segment_ops *const ops##_entry \
		__attribute__((used, section("segment_kinds"))) = &ops

const struct segment_ops *segment_kind_find(const char *name);
/* "error, file, memset, ...", in `text`. */
const char *segment_kind_names(char *text, size_t bytes);

/* Remove a key from the object. Each returns 0, or -EINVAL with a message given. */
int description_take_u64(json_t *keys, const char *key, bool required, uint64_t *value);
int description_take_i64(json_t *keys, const char *key, bool required, int64_t *value);
int description_take_bool(json_t *keys, const char *key, bool *value);
/* `*value` is to be freed by the caller. */
int description_take_string(json_t *keys, const char *key, char **value);
/* The same for one that may be missing: `*value` stays as it is then. */
int description_take_optional_string(json_t *keys, const char *key, char **value);

#endif
