/* SPDX-License-Identifier: MIT */
#include "btrfs/csumtree.h"

#include <errno.h>
#include <stdlib.h>

#include "base/cleanup.h"

/* MAX_CSUM_ITEMS in the kernel's file-item.c: two items of this size never fill a leaf. */
static uint64_t items_max(const struct tree_format *format)
{
	size_t leaf_bytes = format->node_bytes - sizeof(struct disk_header);
	uint64_t count = (leaf_bytes - 2 * sizeof(struct disk_item)) / format->csum->bytes - 1;

	return count < SECTOR_BYTES ? count : SECTOR_BYTES;
}

int csum_items_add(struct tree_builder *tree, uint64_t start, uint64_t count, csum_read *read,
		   void *context)
{
	const struct tree_format *format = tree->format;
	_cleanup_free_ void *csums = malloc(format->node_bytes);
	uint64_t done = 0, most = items_max(format);
	int ret = 0;

	if (!csums)
		return -ENOMEM;
	while (!ret && done < count) {
		struct key key = { OBJECT_EXTENT_CSUM, KEY_EXTENT_CSUM,
				   start + done * SECTOR_BYTES };
		uint64_t part = count - done < most ? count - done : most;
		size_t bytes = part * format->csum->bytes;

		ret = read(context, done, csums, bytes);
		if (!ret)
			ret = tree_add(tree, &key, csums, bytes);
		done += part;
	}
	return ret;
}
