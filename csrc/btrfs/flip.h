/* SPDX-License-Identifier: MIT */
/*
 * Makes a seed of an unmounted file system with a file whose extents are preallocated. They become
 * regular ones, so that reads get data from the device, and the superblock gets the SEEDING flag.
 *
 * The kernel reads a preallocated extent as zeroes, without asking the device. Only the type byte
 * in its file extent item tells it from a regular one. Tree blocks are changed in place, and only
 * their checksums change with it: pointers to a block hold its generation, not its checksum.
 * So nothing else may refer to these blocks, which flip_check() verifies.
 */
#pragma once

#include "btrfs/reader.h"

struct flip {
	/* Input. */
	uint64_t inode; /* number of the file, in the top-level subvolume */

	/* Outputs of flip_check(). */
	uint64_t file_bytes;
	uint64_t extents; /* all of the file's */
	uint64_t prealloc_extents;
	uint64_t prealloc_leaves; /* that hold some of them */
	uint64_t torn_leaves;	  /* that an earlier run has written in part, or one copy of */
	uint64_t metadata_bytes;  /* of the file system, in tree blocks */
};

/*
 * Checks all that has to hold, and changes nothing: no log tree, no features that a seed
 * cannot have, superblock mirrors within the image, no snapshot of the top-level subvolume, each
 * block of its tree referred to once, and a regular file without checksums and holes, whose
 * extents are regular or preallocated, not encoded, and lie in data chunks. Returns 0 or a
 * negative errno with the reason in reader->error.
 */
int flip_check(struct reader *reader, struct flip *flip);

/*
 * Makes the changes; `fd` is the same image, writable. All leaves are on disk before the superblock
 * says that it is a seed. If killed at any moment, it can be run again, after flip_check(), and
 * completes the changes. Returns as flip_check() does.
 */
int flip_write(struct reader *reader, int fd, struct flip *flip);
