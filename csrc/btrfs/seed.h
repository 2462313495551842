/* SPDX-License-Identifier: MIT */
/*
 * The mega-extent seed: a read-only file system with one file of virtual data, whose blocks are
 * not in the image but are served by a block device. Logical addresses equal device offsets (of
 * the first copy).
 *
 * The file is in the top-level subvolume (id 5), and so is an empty subvolume. A plain mount shows
 * the latter, so new files are made in it.
 *
 *	1 MiB			SYSTEM, METADATA (one or two copies) and perhaps an empty stub chunk,
 *				and the superblocks: all that has to be stored, see local_bytes
 *	512 GiB (virtual_start)	the virtual file, byte by byte: chunks of up to chunk_bytes, each
 *				filled by one extent
 *
 * Reasons: 512 GiB is past the last superblock mirror, so that nothing interrupts the file. An
 * extent that crosses chunks would gain nothing, so each chunk has one. All chunks, the last one
 * too, end on 4 GiB: otherwise scrub on kernels since 6.12 reads the virtual data.
 */
#pragma once

#include <stdbool.h>

#include "base/size.h"
#include "btrfs/chunk.h"

#define SEED_VIRTUAL_START GIB(512)
#define SEED_VIRTUAL_MIN_BYTES MIB(4)
#define SEED_CHUNK_STEP_BYTES GIB(4)
#define SEED_GENERATION 1
#define SEED_SUBVOLUME_NAME "files"

/*
 * Offsets are signed 64-bit numbers in the kernel, so the device ends before 8 EiB, and at a
 * multiple of 4 GiB because its last chunk does. The space before the virtual data is not for it.
 */
#define SEED_VIRTUAL_MAX_BYTES (EIB(8) - SEED_CHUNK_STEP_BYTES - SEED_VIRTUAL_START)

/* More chunks than this make mounting slow (0.9 s at 262,144) and the metadata large. */
#define SEED_CHUNKS_MAX 262144u

/*
 * With at least this many chunks, the seed gets a stub: an empty DATA|RAID0 chunk of 1 MiB with a
 * single stripe.
 *
 * A kernel that looks for room for new data walks all data block groups of one profile, and those
 * of a seed are read-only: measured per new 16 KiB file on a sprout, 0.28 ms with 16,449 chunks
 * against 0.01 ms with two. New data takes the profile of highest rank that exists, so with the
 * stub it goes to a RAID0 list of its own: 25k files/s instead of 4.3k. The price is that
 * btrfs-progs prints "Multiple block group profiles detected", hence only where it pays: the walk
 * costs some 17 ns per chunk and file, so with 1,024 chunks a fifth to a third of a new file's
 * 40 to 80 us.
 */
#define SEED_STUB_CHUNKS 1024u

struct seed {
	/* Inputs. */
	uint64_t virtual_bytes;	  /* size of the virtual file */
	uint64_t chunk_bytes;	  /* length of all its chunks but the last; 0: CHUNK_LENGTH_MAX */
	const char *virtual_name; /* its name in the top directory */
	const char *label;
	int64_t time;		/* for all timestamps; seconds since 1970 */
	bool metadata_dup;	/* metadata twice on the device; a sprout inherits that */
	bool inherit_nodatasum; /* new files get no checksums, so that they can be clones */
	uint8_t fsid[UUID_BYTES];
	uint8_t device_uuid[UUID_BYTES];
	uint8_t chunk_tree_uuid[UUID_BYTES];
	uint8_t top_uuid[UUID_BYTES];	    /* of the top-level subvolume */
	uint8_t subvolume_uuid[UUID_BYTES]; /* of the one that is mounted */

	/* Outputs of seed_plan. */
	uint64_t device_bytes;
	uint64_t local_bytes;	 /* the image has to be served up to here; then come holes... */
	uint64_t virtual_start;	 /* ...and from here on virtual data (device offset) */
	uint64_t virtual_inode;	 /* inode number */
	uint64_t metadata_bytes; /* in tree blocks, one copy of each */
	uint64_t chunk_count;	 /* of virtual data */
	bool has_stub;

	/* The local chunks. */
	struct chunk system;
	struct chunk metadata;
	struct chunk stub;
};

/*
 * Lays the seed out. -EINVAL: virtual_bytes is not a multiple of BLOCK_BYTES, or chunk_bytes not of
 * SEED_CHUNK_STEP_BYTES; -ERANGE: one of them is too small or too large, or gives more than
 * SEED_CHUNKS_MAX chunks; -ENAMETOOLONG, or -EINVAL for an impossible name or label; -EEXIST:
 * the name is SEED_SUBVOLUME_NAME; -ENOMEM.
 */
int seed_plan(struct seed *seed);

/*
 * Writes a planned seed's local part into `fd`, which has to read as zeroes up to local_bytes. The
 * file is not extended beyond the last superblock. Returns 0 or a negative errno.
 */
int seed_write(const struct seed *seed, int fd);

/* Returns how many chunks a virtual file of this size gets. */
uint64_t seed_chunk_count(uint64_t virtual_bytes, uint64_t chunk_bytes);
