/* SPDX-License-Identifier: MIT */
/* Zeroes, for the parts of a device that nobody should care about. */
#include <string.h>

#include "server/segment.h"

static int zero_read(struct segment *segment, struct io *io)
{
	(void)segment;
	memset(io->part.data, 0, io->part.length);
	return 0;
}

static const struct segment_ops zero_ops = {
	.name = "zero",
	.read = zero_read,
};
SEGMENT_KIND(zero_ops);
