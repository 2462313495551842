/* SPDX-License-Identifier: MIT */
/*
 * Chunks, which map logical addresses to the device. Each chunk is also one block group, and each
 * of its stripes one device extent. There is only one device, devid 1.
 */
#pragma once

#include <stddef.h>

#include "btrfs/format.h"

enum {
	CHUNK_STRIPES_MAX = 2, /* DUP has two, SINGLE and our RAID0 one */
	CHUNK_DEVID = 1,
};

/*
 * The longest chunk this library makes. Kernels since 6.4 refuse chunks whose number of 64 KiB
 * stripes does not fit in 32 bits, that is from 256 TiB - 64 KiB on (check_chunk_item in
 * fs/btrfs/tree-checker.c, "chunk length too large"); 255 TiB is the next round figure.
 */
#define CHUNK_LENGTH_MAX (255ULL << 40)

struct chunk {
	uint64_t logical;
	uint64_t length; /* of logical addresses, bytes */
	uint64_t type;	 /* CHUNK_* */
	unsigned stripe_count;
	uint64_t stripes[CHUNK_STRIPES_MAX]; /* offsets on the device */
};

struct chunk_list {
	struct chunk *chunks;
	size_t count;
	size_t capacity;
};

void chunk_list_deinit(struct chunk_list *list);

/*
 * Appends a chunk. Returns -ENOMEM, or -EINVAL if it is not behind the one before, too long, not
 * aligned to STRIPE_LEN, not of exactly one type, or has a wrong number of stripes.
 */
int chunk_list_add(struct chunk_list *list, const struct chunk *chunk);

/* Shortens the chunk at `logical`. Returns -EINVAL if there is none, or if it were longer. */
int chunk_list_trim(struct chunk_list *list, uint64_t logical, uint64_t length);

/* Returns the chunk that holds all of [logical, logical + length), or NULL. */
const struct chunk *chunk_find(const struct chunk_list *list, uint64_t logical, uint64_t length);

/* Returns how many bytes of the device the chunk occupies. */
uint64_t chunk_device_bytes(const struct chunk *chunk);

/*
 * Returns the lowest multiple of 1 MiB, not below `from`, where `length` bytes touch neither the
 * first MiB of the device, which kernels keep free, nor a superblock mirror.
 */
uint64_t chunk_place(uint64_t from, uint64_t length);

/* Size of an encoded chunk item with the most stripes. */
#define CHUNK_ITEM_MAX_BYTES \
	(sizeof(struct disk_chunk) + CHUNK_STRIPES_MAX * sizeof(struct disk_stripe))

/* Encode the chunk item; returns its size in bytes. */
size_t chunk_encode(const struct chunk *chunk, const uint8_t device_uuid[UUID_BYTES],
		    uint8_t item[CHUNK_ITEM_MAX_BYTES]);

/*
 * Encodes the superblock's copy of all SYSTEM chunks, through which the chunk tree is found.
 * Returns its size in bytes, or -EFBIG when it does not fit.
 */
int chunk_encode_system(const struct chunk_list *list, const uint8_t device_uuid[UUID_BYTES],
			uint8_t array[SYS_CHUNK_ARRAY_BYTES]);
