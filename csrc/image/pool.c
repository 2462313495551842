/* SPDX-License-Identifier: MIT */
#include "image/pool.h"

#include <stdlib.h>

void *pool_add(struct pool *pool)
{
	uint32_t chunk = pool->count >> POOL_SHIFT;

	if (pool->count == UINT32_MAX)
		return NULL;
	if (!(pool->count & ((1u << POOL_SHIFT) - 1))) {
		/* The list of chunks doubles when their number is a power of two. */
		if (!(chunk & (chunk - 1))) {
			size_t room = chunk ? 2 * (size_t)chunk : 1;
			char **chunks = reallocarray(pool->chunks, room, sizeof(*chunks));

			if (!chunks)
				return NULL;
			pool->chunks = chunks;
		}
		pool->chunks[chunk] = calloc(1u << POOL_SHIFT, pool->element_bytes);
		if (!pool->chunks[chunk])
			return NULL;
	}
	pool->count++;
	return pool_at(pool, pool->count - 1);
}

void pool_deinit(struct pool *pool)
{
	uint32_t chunks =
		(uint32_t)(((uint64_t)pool->count + (1u << POOL_SHIFT) - 1) >> POOL_SHIFT);

	for (uint32_t i = 0; i < chunks; i++)
		free(pool->chunks[i]);
	free(pool->chunks);
	*pool = (struct pool){ .element_bytes = pool->element_bytes };
}
