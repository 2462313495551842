/* SPDX-License-Identifier: MIT */
/* FNV-1a, a hash of few instructions: against damage and for tables, not against malice. */
#pragma once

#include <stddef.h>
#include <stdint.h>

#define FNV_BEGIN 0xcbf29ce484222325ull

static inline uint64_t fnv_add(uint64_t hash, const void *data, size_t bytes)
{
	for (size_t i = 0; i < bytes; i++)
		hash = (hash ^ ((const uint8_t *)data)[i]) * 0x100000001b3ull;
	return hash;
}
