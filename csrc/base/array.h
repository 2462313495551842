/* SPDX-License-Identifier: MIT */
/* Arrays that grow. */
#pragma once

#include <errno.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

/*
 * Makes room for `count` elements of `size` bytes in the array that `array` points to, which is
 * doubled if it has to grow. Returns 0 or -ENOMEM.
 */
static inline int array_reserve_bytes(void *array, size_t *capacity, size_t count, size_t size)
{
	size_t wanted = *capacity ?: 16;
	void *grown;

	if (count <= *capacity)
		return 0;
	while (wanted < count)
		wanted *= 2;
	memcpy(&grown, array, sizeof(grown));
	grown = reallocarray(grown, wanted, size);
	if (!grown)
		return -ENOMEM;
	memcpy(array, &grown, sizeof(grown));
	*capacity = wanted;
	return 0;
}

#define array_reserve(array, capacity, count) \
	array_reserve_bytes(&(array), &(capacity), count, sizeof(*(array)))
