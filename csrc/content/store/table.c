/* SPDX-License-Identifier: MIT */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "content/store/internal.h"

struct table_slot {
	uint64_t hash, number; /* TABLE_FREE: there is none here */
};

static struct table_slot *slots_new(size_t room)
{
	struct table_slot *slots = malloc(room * sizeof(*slots));

	return slots ? memset(slots, 0xff, room * sizeof(*slots)) : NULL; /* TABLE_FREE */
}

int table_init(struct table *table)
{
	*table = (struct table){ .room = 64 };
	table->slots = slots_new(table->room);
	return table->slots ? 0 : -ENOMEM;
}

void table_deinit(struct table *table)
{
	free(table->slots);
}

uint64_t table_hash(uint64_t hash, uint64_t more)
{
	hash = (hash ^ more) * 0xd6e8feb86659fd93ull;
	return hash ^ hash >> 32;
}

/* Returns the slot where the search for `hash` begins. */
static size_t begin(const struct table *table, uint64_t hash)
{
	return hash & (table->room - 1);
}

static size_t after(const struct table *table, size_t at)
{
	return (at + 1) & (table->room - 1);
}

int table_reserve(struct table *table)
{
	struct table grown = { .room = 2 * table->room };

	if (2 * ++table->used <= table->room)
		return 0;
	grown.used = table->used;
	grown.slots = slots_new(grown.room);
	if (!grown.slots)
		return -ENOMEM;
	for (size_t i = 0; i < table->room; i++) {
		size_t at = begin(&grown, table->slots[i].hash);

		if (table->slots[i].number == TABLE_FREE)
			continue;
		while (grown.slots[at].number != TABLE_FREE)
			at = after(&grown, at);
		grown.slots[at] = table->slots[i];
	}
	table_deinit(table);
	*table = grown;
	return 0;
}

uint64_t *table_find(const struct table *table, uint64_t hash,
		     bool (*is)(const void *argument, uint64_t number), const void *argument)
{
	size_t at = begin(table, hash);

	while (table->slots[at].number != TABLE_FREE &&
	       (table->slots[at].hash != hash || !is(argument, table->slots[at].number)))
		at = after(table, at);
	if (table->slots[at].number == TABLE_FREE)
		table->slots[at].hash = hash;
	return &table->slots[at].number;
}
