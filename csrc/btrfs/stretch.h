/* SPDX-License-Identifier: MIT */
/*
 * Moves and lengthens the data chunk of a file system that mkfs.btrfs has just made, while it is
 * empty: a kernel that allocates much then finds one large block group there.
 *
 * The kernel itself makes data chunks of 1 GiB, and looks through all their block groups, one by
 * one, for each that it fills: the time grows with the square of the size. On Linux 6.18 8 TiB
 * took 8 s and 16 TiB 42 s, so 250 TiB would take hours; in one chunk they take 10 s.
 */
#ifndef BTRFS_STRETCH_H
#define BTRFS_STRETCH_H

#include "btrfs/reader.h"

/*
 * Let the data chunk be [start, +length), on the device and in logical addresses; both multiples
 * of STRIPE_LEN, start behind all other chunks. `fd` is the same image, writable.
 *
 * All changes are prepared and verified before the first one is written. -EINVAL: the place cannot
 * be, or the file system is not as mkfs.btrfs makes it (single-block trees, one empty data chunk,
 * a free-space tree); or as the reader's functions; the reason is in reader->error. The reader
 * has to be opened anew afterwards.
 *
 * NB: five blocks and the superblock change together. When it is killed in between, the file
 * system is lost; nothing is in it yet.
 */
int stretch_data_chunk(struct reader *reader, int fd, uint64_t start, uint64_t length);

#endif
