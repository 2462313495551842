/* SPDX-License-Identifier: MIT */
/*
 * A skip list. A node is filled in before it is linked (with release, from the bottom up), and only
 * its links change afterwards. A thread that follows links (with acquire) sees complete nodes, and
 * sees each node once its lowest link is set.
 *
 * Nodes lie one after the other in large chunks: 100,000 mappings take 5 MB, and a program that
 * adds them in order mostly reads memory in order.
 */
#include "content/map.h"

#include <errno.h>
#include <stdlib.h>

#include "base/size.h"

enum {
	/*
	 * One node in four is also in the next level: 4^12 nodes are as many as fit in a large
	 * machine.
	 */
	LEVELS = 12,
	LEVEL_BITS = 2,
	CHUNK_BYTES = 64 << 10,
	HINTS = 16,
};

struct node {
	struct mapping mapping; /* first, see map_after() */
	struct node *next[];	/* one per level of the node */
};

struct chunk {
	struct chunk *older;
	size_t used, bytes; /* of data */
	_Alignas(struct node) uint8_t data[];
};

/*
 * "No free range of `length` bytes on a multiple of `alignment` begins in [from, until)". This
 * stays true, because free ranges only shrink.
 */
struct hint {
	uint64_t length;
	uint64_t alignment;
	uint64_t from, until;
	uint64_t used; /* when it was last used; 0: this entry is free */
};

struct map {
	struct node *first[LEVELS];
	uint64_t count;
	uint64_t random;
	struct chunk *chunk;
	struct hint hints[HINTS];
	uint64_t searches;
};

struct map *map_new(void)
{
	struct map *map = calloc(1, sizeof(*map));

	if (map)
		map->random = 0x9e3779b97f4a7c15;
	return map;
}

void map_free(struct map *map)
{
	struct chunk *chunk = map ? map->chunk : NULL;

	while (chunk) {
		struct chunk *older = chunk->older;

		free(chunk);
		chunk = older;
	}
	free(map);
}

static struct node *follow(struct node *const *link)
{
	return __atomic_load_n(link, __ATOMIC_ACQUIRE);
}

/*
 * Returns the last node that begins at or before `offset`, or NULL. Stores the links that a node
 * right behind it must be linked into in `links`, unless that is NULL.
 */
static struct node *find_before(const struct map *map, uint64_t offset, struct node **links[LEVELS])
{
	struct node *const *link_of = map->first;
	struct node *before = NULL;

	for (int level = LEVELS - 1; level >= 0; level--) {
		struct node *next = follow(&link_of[level]);

		while (next && next->mapping.offset <= offset) {
			before = next;
			link_of = next->next;
			next = follow(&link_of[level]);
		}
		if (links)
			links[level] = (struct node **)&link_of[level];
	}
	return before;
}

static bool contains(const struct mapping *mapping, uint64_t offset)
{
	return offset - mapping->offset < mapping->length;
}

static const struct node *node_after(const struct map *map, const struct node *node)
{
	return follow(node ? &node->next[0] : &map->first[0]);
}

const struct mapping *map_find(const struct map *map, uint64_t offset)
{
	const struct node *before = find_before(map, offset, NULL);

	return before && contains(&before->mapping, offset) ? &before->mapping : NULL;
}

const struct mapping *map_next(const struct map *map, uint64_t offset)
{
	const struct node *node = find_before(map, offset, NULL);

	if (!node || !contains(&node->mapping, offset))
		node = node_after(map, node);
	return node ? &node->mapping : NULL;
}

const struct mapping *map_after(const struct map *map, const struct mapping *mapping)
{
	const struct node *node = node_after(map, (const struct node *)mapping);

	return node ? &node->mapping : NULL;
}

const struct mapping *map_overlap(const struct map *map, uint64_t offset, uint64_t length)
{
	const struct mapping *next = map_next(map, offset);

	/* It ends behind `offset`, so it overlaps if it begins before the end. */
	if (next && (next->offset <= offset || next->offset - offset < length))
		return next;
	return NULL;
}

/* Draws the number of levels of the next node: each further level has a chance of one in four. */
static unsigned draw_height(uint64_t *random)
{
	unsigned height = 1;

	*random ^= *random << 13;
	*random ^= *random >> 7;
	*random ^= *random << 17;
	for (uint64_t bits = *random >> 16; height < LEVELS && !(bits & ((1 << LEVEL_BITS) - 1));
	     bits >>= LEVEL_BITS)
		height++;
	return height;
}

static size_t node_bytes(unsigned height)
{
	return sizeof(struct node) + height * sizeof(struct node *);
}

static int add_chunk(struct map *map, size_t bytes)
{
	struct chunk *chunk = malloc(sizeof(*chunk) + bytes);

	if (!chunk)
		return -ENOMEM;
	*chunk = (struct chunk){ .older = map->chunk, .bytes = bytes };
	map->chunk = chunk;
	return 0;
}

static size_t chunk_room(const struct map *map)
{
	return map->chunk ? map->chunk->bytes - map->chunk->used : 0;
}

int map_reserve(struct map *map, uint64_t count)
{
	uint64_t random = map->random;
	size_t bytes = 0;

	/* Draw the same heights as map_add() will, so that the size is exact. */
	for (uint64_t i = 0; i < count; i++)
		bytes += node_bytes(draw_height(&random));
	if (bytes <= chunk_room(map))
		return 0;
	return add_chunk(map, bytes > CHUNK_BYTES ? bytes : CHUNK_BYTES);
}

/* Takes a node from the memory that map_reserve() has allocated. */
static struct node *take_node(struct map *map, unsigned height)
{
	struct node *node = (struct node *)(map->chunk->data + map->chunk->used);

	map->chunk->used += node_bytes(height);
	return node;
}

int map_add(struct map *map, const struct mapping *mapping, const struct mapping **conflict)
{
	struct node **links[LEVELS];
	const struct node *in_the_way = find_before(map, mapping->offset, links);
	struct node *node;
	unsigned height;
	int err;

	if (!in_the_way || !contains(&in_the_way->mapping, mapping->offset))
		in_the_way = *links[0];
	if (in_the_way && (in_the_way->mapping.offset <= mapping->offset ||
			   in_the_way->mapping.offset - mapping->offset < mapping->length)) {
		*conflict = &in_the_way->mapping;
		return -EEXIST;
	}
	*conflict = NULL;
	err = map_reserve(map, 1);
	if (err)
		return err;
	height = draw_height(&map->random);
	node = take_node(map, height);
	node->mapping = *mapping;
	for (unsigned level = 0; level < height; level++)
		node->next[level] = *links[level];
	for (unsigned level = 0; level < height; level++)
		__atomic_store_n(links[level], node, __ATOMIC_RELEASE);
	__atomic_store_n(&map->count, map->count + 1, __ATOMIC_RELAXED);
	return 0;
}

/*
 * Returns where a search for `length` bytes may begin, by the hints: known->from, or later. What is
 * skipped so may have free ranges that are shorter, and longer than known->length.
 */
static uint64_t skip_known(struct map *map, uint64_t length, struct hint *known)
{
	uint64_t start = known->from;

	for (unsigned i = 0; i < HINTS; i++) {
		struct hint *hint = &map->hints[i];

		if (!hint->used || hint->length > length || known->alignment % hint->alignment ||
		    hint->from > known->from || hint->until <= start)
			continue;
		start = hint->until;
		hint->used = ++map->searches;
		if (known->length < hint->length)
			known->length = hint->length;
	}
	return start;
}

/* Tells whether all that `hint` says follows from `other`. */
static bool follows(const struct hint *hint, const struct hint *other)
{
	return hint->length >= other->length && !(hint->alignment % other->alignment) &&
	       hint->from >= other->from && hint->until <= other->until;
}

static void remember(struct map *map, struct hint *found)
{
	struct hint *place = map->hints;

	for (unsigned i = 0; i < HINTS; i++) {
		struct hint *hint = &map->hints[i];

		if (hint->used && follows(found, hint))
			return;
		/* Extend a hint for the same question that ends where this one begins. */
		if (hint->used && hint->length == found->length &&
		    hint->alignment == found->alignment && hint->from < found->from &&
		    hint->until >= found->from)
			found->from = hint->from;
		if (hint->used && follows(hint, found))
			hint->used = 0;
		if (hint->used < place->used)
			place = hint;
	}
	*place = *found;
	place->used = ++map->searches;
}

/* Rounds `*offset` up to a multiple of `alignment`. Returns false when that overflows. */
static bool align(uint64_t *offset, uint64_t alignment)
{
	uint64_t rest = *offset % alignment;

	return !rest || !__builtin_add_overflow(*offset, alignment - rest, offset);
}

bool map_find_room(struct map *map, uint64_t from, uint64_t end, uint64_t length,
		   uint64_t alignment, uint64_t *offset)
{
	/* `length` becomes that of the longest free range before `until`, plus 1. */
	struct hint known = { .length = 1, .alignment = alignment, .from = from };
	uint64_t at = skip_known(map, length, &known);
	const struct mapping *in_the_way;
	bool found = false;

	while (align(&at, alignment) && at < end && end - at >= length) {
		in_the_way = map_overlap(map, at, length);
		if (!in_the_way) {
			found = true;
			break;
		}
		if (in_the_way->offset > at && in_the_way->offset - at >= known.length)
			known.length = in_the_way->offset - at + 1;
		at = in_the_way->offset + in_the_way->length;
	}
	/* NB: whatever `end` is, nothing fits before `at`. */
	known.until = at;
	if (known.until > from)
		remember(map, &known);
	*offset = at;
	return found;
}

uint64_t map_count(const struct map *map)
{
	return __atomic_load_n(&map->count, __ATOMIC_RELAXED);
}
