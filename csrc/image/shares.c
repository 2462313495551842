/* SPDX-License-Identifier: MIT */
#include "image/shares.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

int shares_init(struct shares *shares)
{
	*shares = (struct shares){ .lock = malloc(sizeof(*shares->lock)) };
	if (!shares->lock)
		return -ENOMEM;
	pthread_mutex_init(shares->lock, NULL);
	return 0;
}

void shares_deinit(struct shares *shares)
{
	if (shares->lock)
		pthread_mutex_destroy(shares->lock);
	free(shares->lock);
	free(shares->shares);
	free(shares->slots);
	*shares = (struct shares){ 0 };
}

/* A digest is random enough to be its own hash. */
static size_t first_slot(const struct shares *shares, const uint8_t *digest)
{
	uint64_t value;

	memcpy(&value, digest, sizeof(value));
	return value & (shares->slot_count - 1);
}

static struct share *find(const struct shares *shares, const uint8_t *digest)
{
	if (!shares->slot_count)
		return NULL;
	for (size_t i = first_slot(shares, digest); shares->slots[i];
	     i = (i + 1) & (shares->slot_count - 1)) {
		struct share *share = &shares->shares[shares->slots[i] - 1];

		if (!memcmp(share->digest, digest, SHARE_DIGEST_BYTES))
			return share;
	}
	return NULL;
}

bool shares_has(const struct shares *shares, const uint8_t *digest)
{
	const struct share *share;

	pthread_mutex_lock(shares->lock);
	share = find(shares, digest);
	pthread_mutex_unlock(shares->lock);
	return share != NULL;
}

struct share *shares_find(struct shares *shares, const uint8_t *digest)
{
	return find(shares, digest);
}

static void insert(struct shares *shares, size_t number)
{
	size_t i = first_slot(shares, shares->shares[number].digest);

	while (shares->slots[i])
		i = (i + 1) & (shares->slot_count - 1);
	shares->slots[i] = (uint32_t)number + 1;
}

static int grow(struct shares *shares)
{
	size_t capacity = shares->capacity ? 2 * shares->capacity : 1024;
	struct share *grown;
	uint32_t *slots;

	if (capacity > UINT32_MAX)
		return -ENOMEM;
	grown = reallocarray(shares->shares, capacity, sizeof(*grown));
	if (!grown)
		return -ENOMEM;
	shares->shares = grown;
	slots = calloc(2 * capacity, sizeof(*slots));
	if (!slots)
		return -ENOMEM;
	free(shares->slots);
	shares->slots = slots;
	shares->slot_count = 2 * capacity;
	shares->capacity = capacity;
	for (size_t i = 0; i < shares->count; i++)
		insert(shares, i);
	return 0;
}

int shares_add(struct shares *shares, const struct share *share)
{
	int ret = 0;

	pthread_mutex_lock(shares->lock);
	if (shares->count == shares->capacity)
		ret = grow(shares);
	if (!ret) {
		shares->shares[shares->count] = *share;
		insert(shares, shares->count++);
	}
	pthread_mutex_unlock(shares->lock);
	return ret;
}

bool shares_has_unused(const struct shares *shares)
{
	for (size_t i = 0; i < shares->count; i++)
		if (!shares->shares[i].uses)
			return true;
	return false;
}
