/* SPDX-License-Identifier: MIT */
#include "btrfs/chunk.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/array.h"
#include "base/size.h"
#include "btrfs/key.h"
#include "btrfs/super.h"

void chunk_list_deinit(struct chunk_list *list)
{
	free(list->chunks);
	*list = (struct chunk_list){ 0 };
}

static bool chunk_is_valid(const struct chunk_list *list, const struct chunk *chunk)
{
	const struct chunk *last = list->count ? &list->chunks[list->count - 1] : NULL;
	uint64_t type = chunk->type & CHUNK_TYPE_MASK;

	if (!chunk->length || chunk->length > CHUNK_LENGTH_MAX || chunk->length % STRIPE_LEN ||
	    chunk->logical % STRIPE_LEN)
		return false;
	if (type != CHUNK_DATA && type != CHUNK_SYSTEM && type != CHUNK_METADATA)
		return false;
	if (chunk->stripe_count != (chunk->type & CHUNK_DUP ? 2 : 1))
		return false;
	return !last || chunk->logical >= last->logical + last->length;
}

int chunk_list_add(struct chunk_list *list, const struct chunk *chunk)
{
	if (!chunk_is_valid(list, chunk))
		return -EINVAL;
	if (array_reserve(list->chunks, list->capacity, list->count + 1))
		return -ENOMEM;
	list->chunks[list->count++] = *chunk;
	return 0;
}

int chunk_list_trim(struct chunk_list *list, uint64_t logical, uint64_t length)
{
	for (size_t i = 0; i < list->count; i++) {
		struct chunk *chunk = &list->chunks[i];

		if (chunk->logical != logical)
			continue;
		if (!length || length > chunk->length || length % STRIPE_LEN)
			return -EINVAL;
		chunk->length = length;
		return 0;
	}
	return -EINVAL;
}

const struct chunk *chunk_find(const struct chunk_list *list, uint64_t logical, uint64_t length)
{
	size_t low = 0, high = list->count;

	while (low < high) {
		size_t middle = (low + high) / 2;
		const struct chunk *chunk = &list->chunks[middle];

		if (logical < chunk->logical)
			high = middle;
		else if (logical - chunk->logical >= chunk->length)
			low = middle + 1;
		else if (length <= chunk->length - (logical - chunk->logical))
			return chunk;
		else
			return NULL;
	}
	return NULL;
}

uint64_t chunk_device_bytes(const struct chunk *chunk)
{
	return chunk->stripe_count * chunk->length;
}

uint64_t chunk_place(uint64_t from, uint64_t length)
{
	uint64_t start = round_up_u64(from < MIB(1) ? MIB(1) : from, MIB(1));

	for (unsigned i = 0; i < SUPER_MIRRORS; i++) {
		uint64_t mirror = super_mirror_offset(i);

		if (start < mirror + SUPER_RESERVED_BYTES && start + length > mirror)
			start = round_up_u64(mirror + SUPER_RESERVED_BYTES, MIB(1));
	}
	return start;
}

size_t chunk_encode(const struct chunk *chunk, const uint8_t device_uuid[UUID_BYTES],
		    uint8_t item[CHUNK_ITEM_MAX_BYTES])
{
	struct disk_chunk disk = {
		.length = htole64(chunk->length),
		.owner = htole64(TREE_EXTENT),
		.stripe_len = htole64(STRIPE_LEN),
		.type = htole64(chunk->type),
		.io_align = htole32(STRIPE_LEN),
		.io_width = htole32(STRIPE_LEN),
		.sector_bytes = htole32(SECTOR_BYTES),
		.stripe_count = htole16((uint16_t)chunk->stripe_count),
		.sub_stripes = htole16(1),
	};
	size_t size = sizeof(disk);

	memcpy(item, &disk, sizeof(disk));
	/* NB: the second bound is for gcc -O3, which warns of more stripes otherwise. */
	for (unsigned i = 0; i < chunk->stripe_count && i < CHUNK_STRIPES_MAX; i++) {
		struct disk_stripe stripe = {
			.devid = htole64(CHUNK_DEVID),
			.offset = htole64(chunk->stripes[i]),
		};

		memcpy(stripe.device_uuid, device_uuid, UUID_BYTES);
		memcpy(item + size, &stripe, sizeof(stripe));
		size += sizeof(stripe);
	}
	return size;
}

int chunk_encode_system(const struct chunk_list *list, const uint8_t device_uuid[UUID_BYTES],
			uint8_t array[SYS_CHUNK_ARRAY_BYTES])
{
	size_t used = 0;

	for (size_t i = 0; i < list->count; i++) {
		const struct chunk *chunk = &list->chunks[i];
		struct key key = { OBJECT_FIRST_CHUNK, KEY_CHUNK_ITEM, chunk->logical };
		struct disk_key disk_key = key_to_disk(&key);
		uint8_t item[CHUNK_ITEM_MAX_BYTES];
		size_t size;

		if (!(chunk->type & CHUNK_SYSTEM))
			continue;
		size = chunk_encode(chunk, device_uuid, item);
		if (used + sizeof(disk_key) + size > SYS_CHUNK_ARRAY_BYTES)
			return -EFBIG;
		memcpy(array + used, &disk_key, sizeof(disk_key));
		memcpy(array + used + sizeof(disk_key), item, size);
		used += sizeof(disk_key) + size;
	}
	return (int)used;
}
