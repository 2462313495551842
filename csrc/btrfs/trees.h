/* SPDX-License-Identifier: MIT */
/* Emit functions for the trees that describe the file system itself. Internal to the library. */
#pragma once

#include "btrfs/image.h"

/* systrees.c: devices, chunks and the list of trees. */
image_emit emit_chunk_tree;
image_emit emit_dev_tree;
image_emit emit_root_tree;
image_emit emit_uuid_tree;
image_emit emit_data_reloc_tree;

/* alloctrees.c: what is in use and what is free. */
image_emit emit_extent_tree;
image_emit emit_block_group_tree;
image_emit emit_free_space_tree;

/* Fills the device item of the chunk tree and of the superblock. */
void image_fill_device(const struct image *image, struct disk_device *device);
