/* SPDX-License-Identifier: MIT */
#include "btrfs/walk.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>

#include "base/cleanup.h"

void block_set_deinit(struct block_set *set)
{
	free(set->slots);
	*set = (struct block_set){ 0 };
}

/* Returns the slot that holds the address, or the free slot where it would be added. */
static struct block_expect *slot_of(const struct block_set *set, uint64_t bytenr)
{
	/* Fibonacci hashing: addresses are multiples of the block size. */
	size_t slot = (size_t)((bytenr * 0x9E3779B97F4A7C15ull) >> 32) & (set->capacity - 1);

	while (set->slots[slot].bytenr && set->slots[slot].bytenr != bytenr)
		slot = (slot + 1) & (set->capacity - 1);
	return &set->slots[slot];
}

const struct block_expect *block_set_find(const struct block_set *set, uint64_t bytenr)
{
	const struct block_expect *slot = set->capacity ? slot_of(set, bytenr) : NULL;

	return slot && slot->bytenr ? slot : NULL;
}

static int grow(struct block_set *set)
{
	struct block_set larger = { .capacity = set->capacity ? 2 * set->capacity : 64 };

	larger.slots = calloc(larger.capacity, sizeof(*larger.slots));
	if (!larger.slots)
		return -ENOMEM;
	for (size_t i = 0; i < set->capacity; i++) {
		if (set->slots[i].bytenr)
			*slot_of(&larger, set->slots[i].bytenr) = set->slots[i];
	}
	free(set->slots);
	set->slots = larger.slots;
	set->capacity = larger.capacity;
	return 0;
}

int block_set_add(struct block_set *set, const struct block_expect *expect)
{
	struct block_expect *slot;

	if (2 * (set->count + 1) > set->capacity && grow(set))
		return -ENOMEM;
	slot = slot_of(set, expect->bytenr);
	set->count += !slot->bytenr;
	*slot = *expect;
	return 0;
}

/* Returns 1 if the block was visited, and this pointer agrees with the first one. */
static int check_visited(const struct walk *walk, const struct block_expect *expect)
{
	const struct block_expect *before =
		walk->visited ? block_set_find(walk->visited, expect->bytenr) : NULL;
	char name[BLOCK_NAME_BYTES], other[TREE_NAME_BYTES];

	if (!before)
		return 0;
	if (before->level == expect->level && before->generation == expect->generation &&
	    tree_holds_files(before->tree) && tree_holds_files(expect->tree) &&
	    (!before->has_first_key || !expect->has_first_key ||
	     key_compare(&before->first_key, &expect->first_key) == 0))
		return 1;
	return reader_fail(walk->reader, -EUCLEAN, "%s: it is in use by the %s, too",
			   block_name(expect, name), tree_name(before->tree, other));
}

static int no_memory(const struct walk *walk)
{
	reader_fail(walk->reader, -ENOMEM, "no memory for a tree block");
	return -ENOMEM;
}

static int walk_block(struct walk *walk, const struct block_expect *expect)
{
	_cleanup_free_ void *block = malloc(walk->reader->node_bytes);
	int ret;

	if (!block)
		return no_memory(walk);
	ret = check_visited(walk, expect);
	if (ret > 0)
		return 0;
	if (!ret)
		ret = reader_read_block(walk->reader, expect, block);
	if (ret) {
		if (ret == -ENOMEM || !walk->damaged)
			return ret;
		return walk->damaged(walk, expect, ret);
	}
	if (walk->visited && block_set_add(walk->visited, expect))
		return no_memory(walk);
	ret = walk->visit(walk, expect, block);
	if (!expect->level)
		return ret;
	for (uint32_t i = 0; i < block_count(block) && !ret; i++) {
		struct block_expect child = block_child(expect, block, i);

		/* Recursion is only as deep as the tree is high: each child's level is less. */
		ret = walk_block(walk, &child);
	}
	return ret;
}

int tree_walk(struct walk *walk, const struct block_expect *root)
{
	return walk_block(walk, root);
}
