/* SPDX-License-Identifier: MIT */
#pragma once

#include <stddef.h>
#include <stdint.h>

/* The unit of everything here: btrfs' sector size and the device's logical block. */
#define BLOCK_BYTES 4096u

#define KIB(n) ((uint64_t)(n) << 10)
#define MIB(n) ((uint64_t)(n) << 20)
#define GIB(n) ((uint64_t)(n) << 30)
#define TIB(n) ((uint64_t)(n) << 40)
#define EIB(n) ((uint64_t)(n) << 60)

/*
 * Parses "4096", "275G", "4MiB", "4E" (binary units, in either case) into bytes. Returns 0, -EINVAL
 * (not a size) or -ERANGE (does not fit into 64 bits).
 */
int size_parse(const char *text, uint64_t *bytes);

enum { SIZE_TEXT_BYTES = 32 };

/*
 * Formats as "4 EiB", "7.2 MiB", "512 B": in the largest unit in which the value is at least one.
 */
const char *size_format(uint64_t bytes, char text[static SIZE_TEXT_BYTES]);

static inline uint64_t round_up_u64(uint64_t value, uint64_t step)
{
	return (value + step - 1) / step * step;
}
