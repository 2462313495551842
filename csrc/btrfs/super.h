/* SPDX-License-Identifier: MIT */
/* Superblocks and their mirrors. */
#pragma once

#include "btrfs/csum.h"
#include "btrfs/format.h"

/* Returns 64 KiB, 64 MiB or 256 GiB (btrfs_sb_offset); `index` < SUPER_MIRRORS. */
uint64_t super_mirror_offset(unsigned index);

/* Returns how many mirrors a device of this size has: those that end within it. */
unsigned super_mirror_count(uint64_t device_bytes);

/*
 * Writes `super` to all mirrors of its device (`total_bytes`), each with its own address and
 * checksum. Returns 0 or a negative errno.
 */
int super_write(int fd, const struct disk_super *super, const struct csum_kind *csum);
