/* SPDX-License-Identifier: MIT */
#include "btrfs/extents.h"

#include <errno.h>
#include <stdlib.h>

#include "base/array.h"
#include "btrfs/csum.h"

void extent_list_deinit(struct extent_list *list)
{
	free(list->extents);
	*list = (struct extent_list){ 0 };
}

int extent_list_add(struct extent_list *list, const struct extent *extent)
{
	if (array_reserve(list->extents, list->capacity, list->count + 1))
		return -ENOMEM;
	list->extents[list->count++] = *extent;
	list->sorted = false;
	return 0;
}

void extent_list_clear(struct extent_list *list)
{
	list->count = 0;
	list->sorted = false;
}

uint64_t extent_data_ref_hash(const struct extent *extent)
{
	le64 root = htole64(extent->root);
	le64 place[2] = { htole64(extent->objectid), htole64(extent->offset) };
	uint32_t high = crc32c_raw(~0u, &root, sizeof(root));
	uint32_t low = crc32c_raw(~0u, place, sizeof(place));

	return ((uint64_t)high << 31) ^ low;
}

static int compare_extents(const void *left, const void *right)
{
	const struct extent *a = left, *b = right;
	uint64_t hash_a, hash_b;

	if (a->start != b->start)
		return a->start < b->start ? -1 : 1;
	/* Within an extent item the greater tree, or hash, comes first. */
	if (!a->is_data && a->root != b->root)
		return a->root > b->root ? -1 : 1;
	hash_a = extent_data_ref_hash(a);
	hash_b = extent_data_ref_hash(b);
	if (hash_a != hash_b)
		return hash_a > hash_b ? -1 : 1;
	/* qsort() of some C libraries would leave these in any order, and images must be equal. */
	if (a->root != b->root)
		return a->root < b->root ? -1 : 1;
	if (a->objectid != b->objectid)
		return a->objectid < b->objectid ? -1 : 1;
	return (a->offset > b->offset) - (a->offset < b->offset);
}

void extent_list_sort(struct extent_list *list)
{
	size_t i = 1;

	if (list->sorted)
		return;
	while (i < list->count && list->extents[i - 1].start < list->extents[i].start)
		i++;
	if (i < list->count)
		qsort(list->extents, list->count, sizeof(*list->extents), compare_extents);
	list->sorted = true;
}

const struct extent *extent_walk_next(struct extent_walk *walk, size_t *count)
{
	const struct extent *heads[2], *first;
	const struct extent_list *list;
	int from;

	for (int i = 0; i < 2; i++) {
		bool at_end = walk->next[i] == walk->lists[i]->count;

		heads[i] = at_end ? NULL : &walk->lists[i]->extents[walk->next[i]];
	}
	if (!heads[0] && !heads[1])
		return NULL;
	from = !heads[0] || (heads[1] && heads[1]->start < heads[0]->start);
	first = heads[from];
	list = walk->lists[from];
	for (*count = 0; walk->next[from] < list->count; walk->next[from]++, ++*count) {
		if (list->extents[walk->next[from]].start != first->start)
			break;
	}
	return first;
}
