/* SPDX-License-Identifier: MIT */
/*
 * Makes a seed of an unmounted file system with a file whose extents are preallocated: they become
 * regular ones, whose blocks a reader gets to see, and the superblock gets the SEEDING flag.
 *
 * A preallocated extent reads as zeroes without anybody asking the device; only the type byte in
 * its file extent item tells it from a regular one. Tree blocks are changed where they stand, so
 * nothing but their checksums changes with it: pointers to a block hold its generation, not its
 * checksum. That is for file systems that nobody else has a stake in; flip_check() asks for it.
 */
#ifndef BTRFS_FLIP_H
#define BTRFS_FLIP_H

#include "btrfs/reader.h"

struct flip {
	/* Input. */
	uint64_t inode; /* number of the file, in the top-level subvolume */

	/* Outputs of flip_check(). */
	uint64_t file_bytes;
	uint64_t extents; /* of the file, all */
	uint64_t prealloc_extents;
	uint64_t prealloc_leaves; /* that hold some of them */
	uint64_t torn_leaves;	  /* that an earlier run was killed while it wrote */
	uint64_t metadata_bytes;  /* of the file system, in tree blocks */
};

/*
 * All that has to hold, looked at without changing anything: no log tree, no features that a seed
 * cannot have, superblock mirrors within the image, one subvolume and no snapshot, each block of
 * its tree referred to once, and a regular file without checksums and holes, whose extents are
 * regular or preallocated, not encoded, and lie in data chunks. Returns 0 or a negative errno with
 * the reason in reader->error.
 */
int flip_check(struct reader *reader, struct flip *flip);

/*
 * Do it; `fd` is the same image, writable. All leaves are on disk before the superblock says that
 * it is a seed. Killed at any moment, it goes on where it was when it is run again, flip_check()
 * first. Returns as flip_check() does.
 */
int flip_write(struct reader *reader, int fd, struct flip *flip);

#endif
