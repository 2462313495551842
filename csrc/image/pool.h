/* SPDX-License-Identifier: MIT */
/* An array that grows without moving its elements. Elements begin as zeros. */
#pragma once

#include <stddef.h>
#include <stdint.h>

enum { POOL_SHIFT = 12 }; /* elements a chunk, as a power of two */

struct pool {
	char **chunks;
	size_t element_bytes;
	uint32_t count;
};

static inline void *pool_at(const struct pool *pool, uint32_t number)
{
	return pool->chunks[number >> POOL_SHIFT] +
	       (number & ((1u << POOL_SHIFT) - 1)) * pool->element_bytes;
}

/* Returns the new element, whose number is `count - 1`, or NULL: no memory, or 2^32 - 1 of them. */
void *pool_add(struct pool *pool);
void pool_deinit(struct pool *pool);
