/* SPDX-License-Identifier: MIT */
/* Items of the checksum tree, which has the checksum of each sector of data. */
#pragma once

#include "btrfs/tree.h"

/* Reads checksums `first` and following, `bytes` of them. Returns 0 or a negative errno. */
typedef int csum_read(void *context, uint64_t first, void *csums, size_t bytes);

/*
 * Adds the checksums of `count` sectors, one behind the other from logical address `start` on, in
 * the largest items that kernels make.
 */
int csum_items_add(struct tree_builder *tree, uint64_t start, uint64_t count, csum_read *read,
		   void *context);
