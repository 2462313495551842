/* SPDX-License-Identifier: MIT */
/*
 * A computed source in which each aligned 8 bytes hold their own offset plus `"base"`,
 * little-endian.
 */
#include <endian.h>
#include <string.h>

#include "base/keys.h"
#include "content/source.h"

struct pattern_mirror {
	int64_t base;
};

static int pattern_parse(struct mirror *mirror, json_t *keys, struct error *error)
{
	struct pattern_mirror *pattern = mirror->private;

	return keys_take_i64(keys, "base", false, &pattern->base, error);
}

/* Reads begin on a block, and end with one or with the source, whose size may be odd. */
static void pattern_compute(const struct mirror *mirror, uint64_t offset, uint32_t length,
			    uint8_t *data)
{
	const struct pattern_mirror *pattern = mirror->private;
	uint64_t value = offset + (uint64_t)pattern->base;

	for (uint32_t at = 0; at < length; at += sizeof(value)) {
		uint64_t word = htole64(value + at);
		uint32_t rest = length - at;

		memcpy(data + at, &word, rest < sizeof(word) ? rest : sizeof(word));
	}
}

static const struct mirror_ops pattern_ops = {
	.name = "pattern",
	.private_bytes = sizeof(struct pattern_mirror),
	.parse = pattern_parse,
	.compute = pattern_compute,
};
MIRROR_KIND(pattern_ops);
