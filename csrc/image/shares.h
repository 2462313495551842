/* SPDX-License-Identifier: MIT */
/*
 * What content the data object has already, by the SHA-256 of whole extents. One thread adds, and
 * others may look meanwhile.
 */
#pragma once

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
	SHARE_DIGEST_BYTES = 32,
	/*
	 * How often an extent is used before its content is stored again: kernels that look who
	 * uses an extent go through all its references.
	 */
	SHARE_USES_MAX = 1024,
};

struct share {
	uint8_t digest[SHARE_DIGEST_BYTES]; /* of the content, uncompressed, whole sectors */
	uint64_t data_offset;
	uint32_t stored_bytes;
	uint32_t uses : 24;
	uint32_t compression : 8;
};

struct shares {
	pthread_mutex_t *lock;
	struct share *shares;
	size_t count, capacity;
	uint32_t *slots; /* number of a share, plus 1; 0: free */
	size_t slot_count;
};

int shares_init(struct shares *shares); /* 0 or -ENOMEM */
void shares_deinit(struct shares *shares);

/* Whether anything was added that is used by nothing. Only for the thread that adds. */
bool shares_has_unused(const struct shares *shares);

bool shares_has(const struct shares *shares, const uint8_t *digest);

/* Returns the share, or NULL. Only for the thread that adds. */
struct share *shares_find(struct shares *shares, const uint8_t *digest);
/* It is not there yet. Returns 0 or -ENOMEM. */
int shares_add(struct shares *shares, const struct share *share);
