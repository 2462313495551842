/* SPDX-License-Identifier: MIT */
/* Keys in the CPU's byte order, and their order in a tree. */
#pragma once

#include "btrfs/format.h"

struct key {
	uint64_t objectid;
	uint8_t type; /* KEY_* */
	uint64_t offset;
};

/* Compares object ids, then types, then offsets (btrfs_comp_cpu_keys). Returns <0, 0 or >0. */
static inline int key_compare(const struct key *a, const struct key *b)
{
	if (a->objectid != b->objectid)
		return a->objectid < b->objectid ? -1 : 1;
	if (a->type != b->type)
		return a->type < b->type ? -1 : 1;
	if (a->offset != b->offset)
		return a->offset < b->offset ? -1 : 1;
	return 0;
}

static inline struct disk_key key_to_disk(const struct key *key)
{
	return (struct disk_key){
		.objectid = htole64(key->objectid),
		.type = key->type,
		.offset = htole64(key->offset),
	};
}

static inline struct key key_from_disk(const struct disk_key *disk)
{
	return (struct key){
		.objectid = le64toh(disk->objectid),
		.type = disk->type,
		.offset = le64toh(disk->offset),
	};
}
