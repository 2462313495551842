/* SPDX-License-Identifier: MIT */
/* Zeroes, for parts of a device without content. */
#include "server/segment.h"

static uint8_t zero_byte(const struct segment *segment)
{
	return 0;
}

static const struct segment_ops zero_ops = {
	.name = "zero",
	.uniform_byte = zero_byte,
};
SEGMENT_KIND(zero_ops);
