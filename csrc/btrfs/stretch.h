/* SPDX-License-Identifier: MIT */
/*
 * Moves and lengthens the empty data chunk of a file system that mkfs.btrfs has just made, so that
 * a kernel that allocates much space finds one large block group.
 *
 * The kernel itself makes data chunks of 1 GiB. For each one that it fills, it searches all block
 * groups, one by one, so the time grows with the square of the size. On Linux 6.18, 8 TiB took 8 s
 * and 16 TiB 42 s, so 250 TiB would take hours; in one chunk they take 10 s.
 */
#pragma once

#include "btrfs/reader.h"

/*
 * Makes [start, +length) the data chunk, on the device and in logical addresses. Both have to be
 * multiples of STRIPE_LEN, and start behind all other chunks. `fd` is the same image, writable.
 *
 * All changes are prepared and verified before the first one is written. -EINVAL: the place is not
 * possible, or the file system is not as mkfs.btrfs makes it (single-block trees, one empty data
 * chunk, a free-space tree); others as in reader.h; the reason is in reader->error. The reader has
 * to be opened again afterwards.
 *
 * NB: five blocks and the superblock change together. If this is killed in between, the file
 * system is lost, but nothing is in it yet.
 */
int stretch_data_chunk(struct reader *reader, int fd, uint64_t start, uint64_t length);
