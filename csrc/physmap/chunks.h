/* SPDX-License-Identifier: MIT */
/* Maps btrfs' logical addresses to devices, with the chunk tree as a sorted array. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct chunk_stripe {
	uint64_t devid;
	uint64_t offset;
};

struct chunk {
	uint64_t start; /* logical */
	uint64_t length;
	uint64_t type;	     /* BTRFS_BLOCK_GROUP_* */
	uint64_t stripe_len; /* bytes on one device before the next one follows */
	size_t first_stripe; /* index into chunk_map.stripes */
	uint16_t num_stripes;
	uint16_t columns; /* devices that data is spread over */
	uint16_t copies;  /* devices that hold the same data */
	bool rotates; /* RAID5/6: parity takes turns, so each row of stripes is shifted by one */
};

struct chunk_map {
	struct chunk *chunks; /* by `start` */
	size_t count, capacity;
	struct chunk_stripe *stripes;
	size_t stripe_count, stripe_capacity;
	size_t last_hit; /* index: extents of a file tend to follow each other */
	/* If set, a tree of its own places striped and mirrored data, not the chunks. */
	bool has_raid_stripe_tree;
};

/* A part of a logical range that is contiguous on one device. */
struct chunk_piece {
	uint64_t logical;
	uint64_t length;
	uint64_t devid;
	uint64_t physical;
	unsigned copy; /* 0 is the first copy */
	const char *profile;
};

typedef int (*chunk_piece_fn)(void *context, const struct chunk_piece *piece);

/* Reads the chunk tree of the file system that `fd` is on. Returns 0 or a negative errno. */
int chunk_map_init(struct chunk_map *map, int fd);
void chunk_map_deinit(struct chunk_map *map);

/*
 * Calls `emit` for each piece of the logical range [*position, end), by rising logical address,
 * and for all copies of a piece in turn. A range that crosses chunks is split there even if its
 * parts touch on the device. Advances `*position`; on an error it is the address concerned.
 *
 * Returns 0, what `emit` returned if that was not 0, -ENOENT when no chunk covers the address,
 * -EOPNOTSUPP for a layout that the chunk alone does not describe.
 */
int chunk_map_pieces(struct chunk_map *map, uint64_t *position, uint64_t end, chunk_piece_fn emit,
		     void *context);
