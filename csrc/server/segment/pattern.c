/* SPDX-License-Identifier: MIT */
/*
 * Each aligned 8 bytes contain their own device offset plus `"base"`, little-endian, so that a read
 * from the wrong place, or of the wrong length, is noticed.
 */
#include <endian.h>
#include <string.h>

#include "base/keys.h"
#include "server/segment.h"

struct pattern_segment {
	int64_t base;
};

static int pattern_parse(struct segment *segment, json_t *keys, struct error *error)
{
	struct pattern_segment *pattern = segment->private;

	return keys_take_i64(keys, "base", false, &pattern->base, error);
}

static int pattern_read(struct segment *segment, struct io *io)
{
	const struct pattern_segment *pattern = segment->private;
	uint64_t value = segment->offset + io->part.offset + (uint64_t)pattern->base;

	for (uint32_t at = 0; at < io->part.length; at += sizeof(value)) {
		uint64_t word = htole64(value + at);

		memcpy(io->part.data + at, &word, sizeof(word));
	}
	return 0;
}

static const struct segment_ops pattern_ops = {
	.name = "pattern",
	.private_bytes = sizeof(struct pattern_segment),
	.parse = pattern_parse,
	.read = pattern_read,
};
SEGMENT_KIND(pattern_ops);
