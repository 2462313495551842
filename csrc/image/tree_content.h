/* SPDX-License-Identifier: MIT */
/* The content of one file of a tree at a time. */
#pragma once

#include <stdbool.h>
#include <zstd.h>

#include "btrfs/cursor.h"
#include "image/tree_entry.h"

struct tree_content {
	struct tree_region *regions;
	size_t region_count, region_capacity;
	char *target; /* of a symbolic link */
	uint8_t *raw, *packed;
	ZSTD_DCtx *zstd;
};

void tree_content_deinit(struct tree_content *content);

/* `cursor` is at the first extent of the file, or behind. Finds its regions, and its target. */
int tree_content_find(struct tree_content *content, struct cursor *cursor, uint64_t inode,
		      const struct tree_entry *entry);

/* Has the visitor take all bytes of the regions; the cursor is at any place. */
int tree_content_read(struct tree_content *content, struct cursor *cursor, uint64_t inode,
		      const struct tree_entry *entry, struct tree_visitor *visitor,
		      bool *is_visitors);
