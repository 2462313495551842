/* SPDX-License-Identifier: MIT */
#include "btrfs/alloc.h"

#include <errno.h>
#include <stdlib.h>

void block_alloc_init(struct block_alloc *alloc, uint32_t node_bytes)
{
	*alloc = (struct block_alloc){ .node_bytes = node_bytes };
}

void block_alloc_deinit(struct block_alloc *alloc)
{
	free(alloc->ranges);
	alloc->ranges = NULL;
}

int block_alloc_add_range(struct block_alloc *alloc, uint64_t start, uint64_t length)
{
	struct block_range *ranges =
		reallocarray(alloc->ranges, alloc->range_count + 1, sizeof(*ranges));

	if (!ranges)
		return -ENOMEM;
	ranges[alloc->range_count++] = (struct block_range){ start, length };
	alloc->ranges = ranges;
	return 0;
}

void block_alloc_trim(struct block_alloc *alloc, uint64_t start, uint64_t length)
{
	for (size_t i = 0; i < alloc->range_count; i++) {
		if (alloc->ranges[i].start == start)
			alloc->ranges[i].length = length;
	}
}

int block_alloc_take(struct block_alloc *alloc, uint64_t *bytenr)
{
	for (; alloc->range < alloc->range_count; alloc->range++, alloc->offset = 0) {
		const struct block_range *range = &alloc->ranges[alloc->range];

		if (alloc->offset + 2ull * alloc->node_bytes > range->length)
			continue;
		*bytenr = range->start + alloc->offset;
		alloc->offset += alloc->node_bytes;
		return 0;
	}
	return -ENOSPC;
}

struct block_alloc_mark block_alloc_mark(const struct block_alloc *alloc)
{
	return (struct block_alloc_mark){ alloc->range, alloc->offset };
}

void block_alloc_rewind(struct block_alloc *alloc, struct block_alloc_mark mark)
{
	alloc->range = mark.range;
	alloc->offset = mark.offset;
}
