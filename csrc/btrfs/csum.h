/* SPDX-License-Identifier: MIT */
/*
 * Checksums of blocks. A kind is one `struct csum_kind` in csum.c; the rest of the library knows
 * none of them. Source: enum btrfs_csum_type in the kernel's btrfs_tree.h.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>

#include "btrfs/format.h"

enum {
	CSUM_TYPE_CRC32C = 0,
	CSUM_TYPE_XXHASH64 = 1,
	CSUM_TYPE_SHA256 = 2,
	CSUM_TYPE_BLAKE2B = 3,
};

struct csum_kind {
	const char *name;
	uint16_t id;	/* as in the superblock */
	uint16_t bytes; /* of the checksum; the rest of the field is zero */
	void (*compute)(const void *data, size_t length, uint8_t csum[CSUM_BYTES]);
};

/* Returns the kind with this id, or NULL when the library does not know it. */
const struct csum_kind *csum_kind_by_id(uint16_t id);
const struct csum_kind *csum_kind_by_name(const char *name);

/* Sets or verifies the checksum at the start of a tree block or superblock of `length` bytes. */
void csum_block_set(const struct csum_kind *kind, void *block, size_t length);
bool csum_block_matches(const struct csum_kind *kind, const void *block, size_t length);

/* Computes crc32c without inverting start or result, as the kernel's crc32c() does. */
uint32_t crc32c_raw(uint32_t seed, const void *data, size_t length);
