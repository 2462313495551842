/* SPDX-License-Identifier: MIT */
/*
 * Where the units of a source lie. Nothing else computes that, so that units need not be powers of
 * two for ever. Pure functions that never wait; any thread may call them.
 */
#pragma once

#include <stdint.h>

#include "content/source.h"

struct unit_extent {
	uint64_t offset; /* in the source, in bytes as they are read */
	uint32_t length;
};

/*
 * The unit that contains byte `offset`. Zeroes between the end of the source and the end of its
 * last block belong to the last unit.
 */
static inline uint64_t unit_of(const struct source *source, uint64_t offset)
{
	if (offset >= source->size)
		offset = source->size - 1;
	return offset >> __builtin_ctz(source->unit_bytes);
}

static inline uint64_t source_units(const struct source *source)
{
	return unit_of(source, source->size - 1) + 1;
}

static inline struct unit_extent unit_extent(const struct source *source, uint64_t unit)
{
	uint64_t offset = unit << __builtin_ctz(source->unit_bytes);
	uint64_t rest = source->size - offset;

	/* Only the last one may be shorter. */
	return (struct unit_extent){
		.offset = offset,
		.length = rest < source->unit_bytes ? (uint32_t)rest : source->unit_bytes,
	};
}

/* The offset behind unit `unit`. */
static inline uint64_t unit_end_offset(const struct source *source, uint64_t unit)
{
	struct unit_extent extent = unit_extent(source, unit);

	return extent.offset + extent.length;
}

/* Where a byte of the source lies in the cache's file. */
static inline uint64_t unit_place(const struct source *source, uint64_t unit)
{
	return unit_extent(source, unit).offset;
}
