/* SPDX-License-Identifier: MIT */
/*
 * Reads a btrfs of one device from an image or a device, and trusts none of its bytes: bad input
 * gives an error that names the structure, never a crash, a loop or a large allocation.
 *
 *	struct reader reader;
 *
 *	if (reader_open(&reader, fd))
 *		msg_error("%s", reader.error);
 *	... tree_root_find() and struct cursor (cursor.h)
 *	reader_close(&reader);
 *
 * Every function that returns a negative errno puts its reason into `error`. -EUCLEAN: the bytes
 * violate the format; -ENOTSUP: they are valid, but this library cannot read them; -EIO: the image
 * ends too early; -ENOMEM; an error of read(2); or what the function's own comment says.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>

#include "btrfs/chunk.h"
#include "btrfs/csum.h"
#include "btrfs/format.h"
#include "btrfs/key.h"

enum { READER_ERROR_BYTES = 512 };

/* What the pointer to a tree block says about it, before it is read. */
struct block_expect {
	uint64_t tree; /* object id */
	uint64_t bytenr;
	uint64_t generation;
	uint8_t level;
	bool has_first_key; /* false for the root of a tree, which may be empty */
	bool has_end_key;   /* false where nothing follows in the tree */
	struct key first_key;
	struct key end_key; /* all keys are smaller */
};

struct reader {
	int fd; /* owned by the caller */
	uint64_t file_bytes;
	struct disk_super super; /* the first superblock, verified */
	const struct csum_kind *csum;
	uint32_t node_bytes;
	uint64_t generation;
	uint64_t devid;
	uint64_t device_bytes;
	uint8_t block_fsid[UUID_BYTES]; /* the fsid in tree blocks */
	uint8_t chunk_tree_uuid[UUID_BYTES];
	bool has_chunk_tree_uuid;
	struct chunk_list chunks; /* ordered by logical address */
	char error[READER_ERROR_BYTES];
};

/*
 * Verifies the first superblock, and reads the chunk tree. `fd` must stay open. On failure,
 * reader_close() is not needed.
 */
int reader_open(struct reader *reader, int fd);
void reader_close(struct reader *reader);

/* Put a reason into `error`; returns `error_number` (negative). */
int reader_fail(struct reader *reader, int error_number, const char *format, ...)
	__attribute__((format(printf, 3, 4)));

/* Returns the chunk that holds [logical, +length), or NULL with a reason. */
const struct chunk *reader_map(struct reader *reader, uint64_t logical, uint64_t length);

enum { TREE_NAME_BYTES = 48, KEY_TEXT_BYTES = 80 };

/* Return "extent tree" or "tree of subvolume 257", and "(257 EXTENT_DATA 0)". */
const char *tree_name(uint64_t objectid, char text[static TREE_NAME_BYTES]);
const char *key_text(const struct key *key, char text[static KEY_TEXT_BYTES]);

/* Returns whether the tree holds files: any subvolume, and the tree for data relocation. */
static inline bool tree_holds_files(uint64_t objectid)
{
	return objectid == TREE_FS || objectid == TREE_DATA_RELOC ||
	       (objectid >= OBJECT_FIRST_FREE && objectid <= (uint64_t)-256);
}

/* For the library's own files: readsuper.c, readchunk.c. */
int reader_read_super(struct reader *reader);
int reader_read_chunks(struct reader *reader);
/* Reads all of [offset, +length), or fails with a reason; `what` names the structure. */
int reader_pread(struct reader *reader, const char *what, void *data, size_t length,
		 uint64_t offset);
