/* SPDX-License-Identifier: MIT */
#include "image/index.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

enum { ROOM_FIRST = 64 };

int index_init(struct index *index)
{
	*index = (struct index){ 0 };
	/* So few bytes are never interrupted; without them the table works as well. */
	return getrandom(index->key, sizeof(index->key), 0) < 0 ? -errno : 0;
}

void index_deinit(struct index *index)
{
	free(index->slots);
	*index = (struct index){ 0 };
}

static inline uint64_t rotate(uint64_t word, int bits)
{
	return word << bits | word >> (64 - bits);
}

static inline void sip_round(uint64_t v[4])
{
	v[0] += v[1];
	v[1] = rotate(v[1], 13) ^ v[0];
	v[0] = rotate(v[0], 32);
	v[2] += v[3];
	v[3] = rotate(v[3], 16) ^ v[2];
	v[0] += v[3];
	v[3] = rotate(v[3], 21) ^ v[0];
	v[2] += v[1];
	v[1] = rotate(v[1], 17) ^ v[2];
	v[2] = rotate(v[2], 32);
}

static inline void sip_word(uint64_t v[4], uint64_t word)
{
	v[3] ^= word;
	sip_round(v);
	v[0] ^= word;
}

/* SipHash-1-3 (Aumasson and Bernstein) of the number and the bytes; its lower half. */
uint32_t index_hash(const struct index *index, uint64_t number, const void *bytes, size_t length)
{
	uint64_t v[4] = { index->key[0] ^ 0x736f6d6570736575, index->key[1] ^ 0x646f72616e646f6d,
			  index->key[0] ^ 0x6c7967656e657261, index->key[1] ^ 0x7465646279746573 };
	uint64_t word;

	sip_word(v, number);
	for (; length >= sizeof(word); length -= sizeof(word)) {
		memcpy(&word, bytes, sizeof(word));
		sip_word(v, word);
		bytes = (const char *)bytes + sizeof(word);
	}
	word = (uint64_t)length << 56;
	memcpy(&word, bytes, length);
	sip_word(v, word);
	v[2] ^= 0xff;
	for (int i = 0; i < 3; i++)
		sip_round(v);
	return (uint32_t)(v[0] ^ v[1] ^ v[2] ^ v[3]);
}

uint32_t index_find(const struct index *index, uint32_t hash, index_same *same, const void *context,
		    const void *key)
{
	uint32_t mask = index->room - 1;

	if (!index->room)
		return 0;
	for (uint32_t i = hash & mask; index->slots[i].value; i = (i + 1) & mask)
		if (index->slots[i].hash == hash && same(context, index->slots[i].value, key))
			return index->slots[i].value;
	return 0;
}

static void put(struct index_slot *slots, uint32_t mask, struct index_slot slot)
{
	uint32_t i = slot.hash & mask;

	while (slots[i].value)
		i = (i + 1) & mask;
	slots[i] = slot;
}

static int grow(struct index *index)
{
	uint32_t room = index->room ? 2 * index->room : ROOM_FIRST;
	struct index_slot *slots = room ? calloc(room, sizeof(*slots)) : NULL;

	if (!slots)
		return -ENOMEM;
	for (uint32_t i = 0; i < index->room; i++)
		if (index->slots[i].value)
			put(slots, room - 1, index->slots[i]);
	free(index->slots);
	index->slots = slots;
	index->room = room;
	return 0;
}

int index_add(struct index *index, uint32_t hash, uint32_t value)
{
	/* At most three quarters full. */
	if (index->count >= index->room / 4 * 3 && grow(index))
		return -ENOMEM;
	put(index->slots, index->room - 1, (struct index_slot){ hash, value });
	index->count++;
	return 0;
}

void index_remove(struct index *index, uint32_t hash, uint32_t value)
{
	uint32_t mask = index->room - 1, hole = hash & mask;

	while (index->slots[hole].value != value)
		hole = (hole + 1) & mask;
	/* What comes behind moves up, unless it would come before its own place. */
	for (uint32_t i = (hole + 1) & mask; index->slots[i].value; i = (i + 1) & mask) {
		uint32_t from_place = (i - index->slots[i].hash) & mask;
		uint32_t from_hole = (i - hole) & mask;

		if (from_place < from_hole)
			continue;
		index->slots[hole] = index->slots[i];
		hole = i;
	}
	index->slots[hole] = (struct index_slot){ 0 };
	index->count--;
}
