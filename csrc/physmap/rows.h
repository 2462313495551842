/* SPDX-License-Identifier: MIT */
/* Rows of a physical map, and the formats that they are written in. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Kinds of file extents; the first three are the on-disk BTRFS_FILE_EXTENT_* values. */
enum map_kind {
	MAP_INLINE = 0,
	MAP_REGULAR = 1,
	MAP_PREALLOC = 2,
	MAP_HOLE = 255,
};

/*
 * One row, with nine columns. A logical extent that is not in one piece on one device has a row for
 * each piece and copy, with equal values in all but the last three columns.
 */
struct map_row {
	uint64_t file_offset; /* where in the file this extent begins */
	uint64_t file_size;   /* how many of the file's bytes it holds, before compression */
	/* Where in the (uncompressed) logical extent the file's bytes begin: not 0 after a clone
	 * of a part, or when the extent's head was overwritten. */
	uint64_t extent_offset;
	uint8_t kind;		 /* enum map_kind, or any other value found on disk */
	uint8_t compression;	 /* as on disk: 0 none, 1 zlib, 2 lzo, 3 zstd */
	uint8_t encryption;	 /* as on disk: 0 none */
	uint16_t other_encoding; /* as on disk: 0 none */
	bool is_mapped;		 /* the columns below are valid: not for inline and hole */
	uint64_t logical_size;	 /* of the whole extent, as stored (compressed) */
	uint64_t logical_offset; /* its address in the file system's address space */
	uint64_t physical_size;	 /* of this piece */
	uint64_t devid;
	uint64_t physical_offset; /* of this piece, on that device */
	/* Not among the nine columns; only in JSON. */
	uint64_t piece_offset; /* of this piece, in the logical extent */
	unsigned copy;	       /* 0 is the first */
	const char *profile;   /* of the chunk: "single", "raid1" ... */
};

enum { MAP_OUTPUT_BYTES = 1 << 17 };

/* Buffered output that keeps its first error. */
struct map_output {
	int fd;
	int error; /* 0 or a negative errno */
	size_t used;
	char data[MAP_OUTPUT_BYTES];
};

struct map_format {
	const char *name;
	void (*begin)(struct map_output *output); /* optional */
	void (*row)(struct map_output *output, const struct map_row *row);
};

/* Returns NULL when there is no format of that name. */
const struct map_format *map_format_find(const char *name);

/* Writes out what is buffered. Returns 0 or the first error of this output. */
int map_output_flush(struct map_output *output);
