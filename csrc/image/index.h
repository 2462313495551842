/* SPDX-License-Identifier: MIT */
/*
 * A hash table of numbers: the caller knows what has these numbers, and whether two of those are
 * equal. Hashes are keyed at random, so that no input can make them collide.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct index_slot {
	uint32_t hash;
	uint32_t value; /* 0: the slot is free */
};

struct index {
	struct index_slot *slots;
	uint32_t room; /* a power of two, or 0 */
	uint32_t count;
	uint64_t key[2];
};

/* Whether `value` is the number of the thing that `key` describes. */
typedef bool index_same(const void *context, uint32_t value, const void *key);

int index_init(struct index *index); /* with a random key */
void index_deinit(struct index *index);

uint32_t index_hash(const struct index *index, uint64_t number, const void *bytes, size_t length);

/* Returns the value, or 0. */
uint32_t index_find(const struct index *index, uint32_t hash, index_same *same, const void *context,
		    const void *key);
/* The value is not there yet, and not 0. Returns 0 or -ENOMEM. */
int index_add(struct index *index, uint32_t hash, uint32_t value);
/* The value is there. */
void index_remove(struct index *index, uint32_t hash, uint32_t value);
