/* SPDX-License-Identifier: MIT */
/* All bytes are the same: `"byte": 0..255`. Benchmarks use this kind because it costs least. */
#include <errno.h>

#include "base/keys.h"
#include "server/segment.h"

struct memset_segment {
	uint8_t byte;
};

static int memset_parse(struct segment *segment, json_t *keys, struct error *error)
{
	struct memset_segment *memset_segment = segment->private;
	uint64_t byte = 0;
	int err = keys_take_u64(keys, "byte", true, &byte, error);

	if (err)
		return err;
	if (byte > 255)
		return error_set(error, -EINVAL, "\"byte\" is %llu, it must be 0 to 255",
				 (unsigned long long)byte);
	memset_segment->byte = (uint8_t)byte;
	return 0;
}

static uint8_t memset_byte(const struct segment *segment)
{
	const struct memset_segment *memset_segment = segment->private;

	return memset_segment->byte;
}

static const struct segment_ops memset_ops = {
	.name = "memset",
	.private_bytes = sizeof(struct memset_segment),
	.parse = memset_parse,
	.uniform_byte = memset_byte,
};
SEGMENT_KIND(memset_ops);
