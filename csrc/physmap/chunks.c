/* SPDX-License-Identifier: MIT */
#include "physmap/chunks.h"

#include "base/array.h"
#include "base/cleanup.h"
#include "physmap/search.h"

#include <assert.h>
#include <endian.h>
#include <errno.h>
#include <linux/btrfs.h>
#include <linux/btrfs_tree.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>

/* Since Linux 6.7; older headers lack it. */
#ifndef BTRFS_FEATURE_INCOMPAT_RAID_STRIPE_TREE
#define BTRFS_FEATURE_INCOMPAT_RAID_STRIPE_TREE (1ULL << 14)
#endif

/* linux/btrfs_tree.h, struct btrfs_chunk: fixed part, then num_stripes of struct btrfs_stripe. */
static_assert(sizeof(struct btrfs_stripe) == 32, "struct btrfs_stripe");
static_assert(offsetof(struct btrfs_chunk, stripe) == 48, "struct btrfs_chunk");

static const struct profile {
	uint64_t flag;
	const char *name;
} profiles[] = {
	{ BTRFS_BLOCK_GROUP_RAID0, "raid0" },
	{ BTRFS_BLOCK_GROUP_RAID1, "raid1" },
	{ BTRFS_BLOCK_GROUP_RAID1C3, "raid1c3" },
	{ BTRFS_BLOCK_GROUP_RAID1C4, "raid1c4" },
	{ BTRFS_BLOCK_GROUP_DUP, "dup" },
	{ BTRFS_BLOCK_GROUP_RAID10, "raid10" },
	{ BTRFS_BLOCK_GROUP_RAID5, "raid5" },
	{ BTRFS_BLOCK_GROUP_RAID6, "raid6" },
	{ 0, "single" },
};

static const char *profile_name(uint64_t type)
{
	const struct profile *profile = profiles;

	while (profile->flag && !(type & profile->flag))
		profile++;
	return profile->name;
}

/* Sets columns, copies and rotates. Returns -EUCLEAN for an impossible number of stripes. */
static int set_geometry(struct chunk *chunk, uint16_t sub_stripes)
{
	uint16_t stripes = chunk->num_stripes;
	uint16_t parity = 0;

	if (!stripes || !chunk->length || !chunk->stripe_len)
		return -EUCLEAN;
	chunk->columns = 1;
	chunk->copies = stripes;
	if (chunk->type & BTRFS_BLOCK_GROUP_RAID56_MASK) {
		parity = chunk->type & BTRFS_BLOCK_GROUP_RAID6 ? 2 : 1;
		if (stripes <= parity)
			return -EUCLEAN;
		chunk->columns = stripes - parity;
		chunk->copies = 1;
		chunk->rotates = true;
	} else if (chunk->type & BTRFS_BLOCK_GROUP_RAID10) {
		if (!sub_stripes || stripes % sub_stripes)
			return -EUCLEAN;
		chunk->columns = stripes / sub_stripes;
		chunk->copies = sub_stripes;
	} else if (chunk->type & BTRFS_BLOCK_GROUP_RAID0) {
		chunk->columns = stripes;
		chunk->copies = 1;
	} else if (!(chunk->type & BTRFS_BLOCK_GROUP_PROFILE_MASK) && stripes != 1) {
		return -EUCLEAN;
	}
	return 0;
}

static int add_chunk(struct chunk_map *map, const struct tree_item *item)
{
	struct btrfs_chunk raw;
	struct chunk chunk;
	const char *stripe_data;
	int ret;

	if (item->length < sizeof(raw))
		return -EUCLEAN;
	memcpy(&raw, item->data, sizeof(raw));
	chunk = (struct chunk){
		.start = item->offset,
		.length = le64toh(raw.length),
		.type = le64toh(raw.type),
		.stripe_len = le64toh(raw.stripe_len),
		.first_stripe = map->stripe_count,
		.num_stripes = le16toh(raw.num_stripes),
	};
	if (item->length < offsetof(struct btrfs_chunk, stripe) +
				   chunk.num_stripes * sizeof(struct btrfs_stripe) ||
	    chunk.start + chunk.length < chunk.start)
		return -EUCLEAN;
	ret = set_geometry(&chunk, le16toh(raw.sub_stripes));
	if (ret < 0)
		return ret;

	ret = array_reserve(map->stripes, map->stripe_capacity,
			    map->stripe_count + chunk.num_stripes);
	if (ret < 0)
		return ret;
	stripe_data = (const char *)item->data + offsetof(struct btrfs_chunk, stripe);
	for (unsigned i = 0; i < chunk.num_stripes; i++) {
		struct btrfs_stripe stripe;

		memcpy(&stripe, stripe_data + i * sizeof(stripe), sizeof(stripe));
		map->stripes[map->stripe_count++] = (struct chunk_stripe){
			.devid = le64toh(stripe.devid),
			.offset = le64toh(stripe.offset),
		};
	}

	ret = array_reserve(map->chunks, map->capacity, map->count + 1);
	if (ret < 0)
		return ret;
	map->chunks[map->count++] = chunk;
	return 0;
}

int chunk_map_init(struct chunk_map *map, int fd)
{
	_cleanup_(tree_search_deinit) struct tree_search search = { 0 };
	struct btrfs_ioctl_feature_flags features = { 0 };
	struct tree_item item;
	int ret;

	*map = (struct chunk_map){ 0 };
	if (ioctl(fd, BTRFS_IOC_GET_FEATURES, &features) < 0)
		return -errno;
	map->has_raid_stripe_tree = features.incompat_flags &
				    BTRFS_FEATURE_INCOMPAT_RAID_STRIPE_TREE;

	ret = tree_search_init(&search, fd, BTRFS_CHUNK_TREE_OBJECTID,
			       BTRFS_FIRST_CHUNK_TREE_OBJECTID, BTRFS_CHUNK_ITEM_KEY);
	if (ret < 0)
		return ret;
	/* The key's offset is the logical address, so the items come sorted. */
	while ((ret = tree_search_next(&search, &item)) > 0) {
		ret = add_chunk(map, &item);
		if (ret < 0)
			break;
	}
	if (ret < 0)
		chunk_map_deinit(map);
	return ret;
}

void chunk_map_deinit(struct chunk_map *map)
{
	free(map->chunks);
	free(map->stripes);
	*map = (struct chunk_map){ 0 };
}

static bool covers(const struct chunk *chunk, uint64_t logical)
{
	return logical >= chunk->start && logical - chunk->start < chunk->length;
}

static const struct chunk *find_chunk(struct chunk_map *map, uint64_t logical)
{
	size_t low = 0;
	size_t high = map->count;

	if (map->last_hit < map->count && covers(&map->chunks[map->last_hit], logical))
		return &map->chunks[map->last_hit];
	while (low < high) {
		size_t middle = low + (high - low) / 2;

		if (map->chunks[middle].start + (map->chunks[middle].length - 1) < logical)
			low = middle + 1;
		else
			high = middle;
	}
	if (low == map->count || !covers(&map->chunks[low], logical))
		return NULL;
	map->last_hit = low;
	return &map->chunks[low];
}

/*
 * Finds the first piece of the chunk from `offset` on; returns the index of its first copy's
 * stripe. Data goes round the columns in steps of stripe_len; one round is a row. In RAID5/6, a
 * row begins one device further than the previous row, and ends with its parity (see
 * btrfs_map_block() in fs/btrfs/volumes.c).
 */
static size_t first_piece(const struct chunk *chunk, uint64_t offset, uint64_t *in_stripe,
			  uint64_t *length)
{
	uint64_t number, row, column;

	if (chunk->columns == 1 && !chunk->rotates) {
		*in_stripe = offset;
		*length = chunk->length - offset;
		return 0;
	}
	number = offset / chunk->stripe_len;
	row = number / chunk->columns;
	column = number % chunk->columns;
	*in_stripe = row * chunk->stripe_len + offset % chunk->stripe_len;
	*length = chunk->stripe_len - offset % chunk->stripe_len;
	if (*length > chunk->length - offset)
		*length = chunk->length - offset;
	return chunk->rotates ? (row + column) % chunk->num_stripes : column * chunk->copies;
}

static int check_layout(const struct chunk_map *map, const struct chunk *chunk)
{
	const uint64_t known = BTRFS_BLOCK_GROUP_TYPE_MASK | BTRFS_BLOCK_GROUP_PROFILE_MASK;

	/* An unknown flag may mean that data are elsewhere, as with a remap tree. */
	if (chunk->type & ~known)
		return -EOPNOTSUPP;
	if (map->has_raid_stripe_tree && chunk->type & BTRFS_BLOCK_GROUP_PROFILE_MASK)
		return -EOPNOTSUPP;
	return 0;
}

int chunk_map_pieces(struct chunk_map *map, uint64_t *position, uint64_t end, chunk_piece_fn emit,
		     void *context)
{
	int ret;

	while (*position < end) {
		const struct chunk *chunk = find_chunk(map, *position);
		struct chunk_piece piece = { .logical = *position };
		uint64_t in_stripe;
		size_t first;

		ret = chunk ? check_layout(map, chunk) : -ENOENT;
		if (ret < 0)
			return ret;
		first = first_piece(chunk, *position - chunk->start, &in_stripe, &piece.length);
		if (piece.length > end - *position)
			piece.length = end - *position;
		piece.profile = profile_name(chunk->type);
		for (; piece.copy < chunk->copies; piece.copy++) {
			const struct chunk_stripe *stripe =
				&map->stripes[chunk->first_stripe + first + piece.copy];

			piece.devid = stripe->devid;
			piece.physical = stripe->offset + in_stripe;
			ret = emit(context, &piece);
			if (ret)
				return ret;
		}
		*position += piece.length;
	}
	return 0;
}
