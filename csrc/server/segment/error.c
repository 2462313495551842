/* SPDX-License-Identifier: MIT */
/* Reads fail: this address space has no content yet. */
#include <errno.h>

#include "server/segment.h"

static int error_read(struct segment *segment, struct io *io)
{
	return -EIO;
}

static const struct segment_ops error_ops = {
	.name = "error",
	.read = error_read,
};
SEGMENT_KIND(error_ops);
