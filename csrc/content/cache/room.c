/* SPDX-License-Identifier: MIT */
/* Finds and makes room for ranges before any of them is fetched. */
#include <errno.h>
#include <stdlib.h>

#include "base/array.h"
#include "content/cache/internal.h"

static int compare(const void *left, const void *right)
{
	const struct cache_range *a = left, *b = right;

	if (a->object != b->object)
		return a->object < b->object ? -1 : 1;
	return a->first < b->first ? -1 : a->first > b->first;
}

/* Sorts the ranges, and merges those that overlap. */
static void merge(struct cache_ranges *ranges)
{
	size_t kept = 0;

	if (ranges->count)
		qsort(ranges->list, ranges->count, sizeof(*ranges->list), compare);
	for (size_t i = 0; i < ranges->count; i++) {
		const struct cache_range *range = &ranges->list[i];
		struct cache_range *last = kept ? &ranges->list[kept - 1] : NULL;

		if (!last || last->object != range->object || last->end < range->first)
			ranges->list[kept++] = *range;
		else if (last->end < range->end)
			last->end = range->end;
	}
	ranges->count = kept;
}

bool ranges_contain(const struct cache_ranges *ranges, const struct cache_object *object,
		    uint64_t unit)
{
	size_t low = 0, high = ranges ? ranges->count : 0;

	while (low < high) {
		size_t at = low + (high - low) / 2;
		const struct cache_range *range = &ranges->list[at];

		if (range->object < object || (range->object == object && range->end <= unit))
			low = at + 1;
		else if (range->object > object || range->first > unit)
			high = at;
		else
			return true;
	}
	return false;
}

static uint64_t count_there(const struct cache_object *object, uint64_t first, uint64_t end)
{
	uint64_t count = 0;

	while (first < end) {
		const struct cache_group *group = &object->groups[first / CACHE_GROUP_UNITS];
		unsigned bit = first % CACHE_GROUP_UNITS;

		if (bit % 64 || end - first < 64) {
			count += object_has(object, first++);
			continue;
		}
		count += (unsigned)__builtin_popcountll(
			__atomic_load_n(&group->bits[bit / 64], __ATOMIC_RELAXED));
		first += 64;
	}
	return count;
}

/* Adds up the bytes of the range that are cached, and those that are missing. */
static void add_up(const struct cache_range *range, uint64_t *there, uint64_t *missing)
{
	const struct cache_object *object = range->object;
	uint64_t count = count_there(object, range->first, range->end);
	bool with_last = range->end == object->units;
	bool has_last = with_last && object_has(object, object->units - 1);

	*there += object_units_bytes(object, count, has_last);
	*missing += object_units_bytes(object, range->end - range->first - count,
				       with_last && !has_last);
}

/* The bytes of all pinned contents. The caller holds the directory's lock. */
static uint64_t pinned_bytes(struct cache *cache)
{
	uint64_t bytes = 0;

	for (size_t i = 0; i < cache->content_count; i++) {
		struct error error = {};
		struct cache_object *object;

		if (!content_is_pinned(cache, cache->contents[i].name) ||
		    content_acquire(cache, &cache->contents[i], &object, &error))
			continue;
		bytes += object_count_bytes(object);
		content_release(object);
	}
	return bytes;
}

static uint64_t less(uint64_t bytes, uint64_t by)
{
	return bytes > by ? bytes - by : 0;
}

static uint64_t smaller(uint64_t a, uint64_t b)
{
	return a < b ? a : b;
}

/* The caller holds the directory's lock. */
static int plan(struct cache *cache, const struct cache_ranges *ranges, bool evict,
		struct cache_room *room)
{
	uint64_t there = 0, missing = 0, all, used, wanted, spare;
	bool pinned = false;
	int err = contents_read(cache);

	if (err)
		return err;
	for (size_t i = 0; i < ranges->count; i++) {
		const struct cache_range *range = &ranges->list[i];
		uint64_t kept = 0;

		if (!i || range->object != ranges->list[i - 1].object)
			pinned = content_is_pinned(cache, range->object->name);
		/* Pinned units take nothing of the room for the others. */
		add_up(range, pinned ? &kept : &there, &missing);
	}
	all = cache_capacity(cache, &used);
	room->holds_bytes = less(all, pinned_bytes(cache));
	spare = less(all, used);
	wanted = smaller(missing, less(room->holds_bytes, there));
	if (evict && wanted > spare)
		spare += evict_others(cache, ranges, wanted - spare);
	room->bytes = smaller(wanted, spare);
	return 0;
}

int cache_room_for(struct cache *cache, struct cache_ranges *ranges, bool evict,
		   struct cache_room *room)
{
	struct error error = {};
	int err;

	merge(ranges);
	/*
	 * Read the limits again, because the user may have just raised them. The thread reports
	 * errors.
	 */
	limits_read(cache, &error);
	/* Units on their way to the disk are not counted as cached. */
	cache_sync(cache);
	err = cache_lock(cache);
	if (err)
		return err;
	err = plan(cache, ranges, evict, room);
	cache_unlock(cache);
	return err;
}

int cache_ranges_add(struct cache_ranges *ranges, struct cache_object *object, uint64_t first,
		     uint64_t end)
{
	if (end > object->units)
		end = object->units;
	if (first >= end)
		return 0;
	if (array_reserve(ranges->list, ranges->room, ranges->count + 1))
		return -ENOMEM;
	ranges->list[ranges->count++] = (struct cache_range){ object, first, end };
	return 0;
}

void cache_ranges_free(struct cache_ranges *ranges)
{
	free(ranges->list);
}
