/* SPDX-License-Identifier: MIT */
#include "image/arena.h"

#include <stdlib.h>

enum { CHUNKS_MAX = 1 << (32 - ARENA_SHIFT) };

static int add_chunk(struct arena *arena)
{
	if (arena->chunk_count == CHUNKS_MAX)
		return -1;
	if (!arena->chunks)
		/* Of pointers: 32 KiB. */
		arena->chunks = calloc(CHUNKS_MAX, sizeof(*arena->chunks));
	if (!arena->chunks)
		return -1;
	arena->chunks[arena->chunk_count] = malloc(ARENA_PIECE_BYTES_MAX);
	if (!arena->chunks[arena->chunk_count])
		return -1;
	arena->chunk_count++;
	arena->used_bytes = 0;
	return 0;
}

uint32_t arena_add(struct arena *arena, size_t bytes)
{
	uint32_t place;

	if (bytes > ARENA_PIECE_BYTES_MAX)
		return 0;
	if (!arena->chunk_count) {
		if (add_chunk(arena))
			return 0;
		arena->used_bytes = 1; /* so that no place is 0 */
	}
	if (bytes > ARENA_PIECE_BYTES_MAX - arena->used_bytes && add_chunk(arena))
		return 0;
	if (arena->used_bytes == ARENA_PIECE_BYTES_MAX && add_chunk(arena))
		return 0;
	place = ((arena->chunk_count - 1) << ARENA_SHIFT) + arena->used_bytes;
	arena->used_bytes += (uint32_t)bytes;
	return place;
}

void arena_deinit(struct arena *arena)
{
	for (uint32_t i = 0; i < arena->chunk_count; i++)
		free(arena->chunks[i]);
	free(arena->chunks);
	*arena = (struct arena){ 0 };
}
