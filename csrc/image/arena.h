/* SPDX-License-Identifier: MIT */
/*
 * Bytes that are added and stay where they are, up to 4 GiB of them. Places are 32 bits; no place
 * is 0.
 */
#pragma once

#include <stddef.h>
#include <stdint.h>

enum {
	ARENA_SHIFT = 20,
	ARENA_PIECE_BYTES_MAX = 1 << ARENA_SHIFT, /* that one call can add */
};

struct arena {
	char **chunks;
	uint32_t chunk_count;
	uint32_t used_bytes; /* of the last chunk */
};

static inline void *arena_at(const struct arena *arena, uint32_t place)
{
	return arena->chunks[place >> ARENA_SHIFT] + (place & (ARENA_PIECE_BYTES_MAX - 1));
}

/* Returns the place of `bytes` for the caller to fill, or 0: no memory, or 4 GiB are in use. */
uint32_t arena_add(struct arena *arena, size_t bytes);
void arena_deinit(struct arena *arena);
