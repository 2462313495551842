/* SPDX-License-Identifier: MIT */
/* The types and functions that the files of the check share. */
#pragma once

#include "btrfs/check/report.h"
#include "btrfs/cursor.h"
#include "btrfs/layout.h"
#include "btrfs/walk.h"

/* An extent in use, as the extent tree lists it. */
struct used {
	uint64_t start;
	uint64_t length;
	uint64_t refs;
	uint64_t flags; /* EXTENT_* */
	uint8_t level;	/* of a tree block */
};

/* A reference to an extent: a back reference in the extent tree, or a pointer in a tree. */
struct ref {
	uint64_t start;	 /* the extent's address */
	uint64_t origin; /* object id of a tree; shared: address of the block that refers */
	uint64_t objectid;
	uint64_t offset;
	uint64_t length; /* of the extent, according to the pointer; 0 in the extent tree */
	uint64_t count;
	uint8_t type;  /* KEY_TREE_BLOCK_REF and so on */
	uint8_t level; /* of a tree block */
};

struct ref_list {
	struct ref *refs;
	size_t count;
	size_t capacity;
};

struct check {
	struct reader *reader;
	struct layout *layout;
	struct report *report;

	struct used *used; /* ordered by address */
	size_t used_count;
	size_t used_capacity;
	bool used_known; /* the extent tree could be read to its end */

	struct ref_list told; /* back references in the extent tree */
	struct ref_list made; /* pointers in all trees */
	bool refs_known;      /* all trees could be read to their end */
	struct block_set blocks;
};

int ref_list_add(struct ref_list *list, const struct ref *ref);

/* Returns the extent that starts at this address, or NULL. */
const struct used *check_find_used(const struct check *check, uint64_t start);

/*
 * Handles the result of a reader function. Damage becomes a violation of `rule`, and 0 is returned;
 * any other error is returned.
 */
int check_damage(struct check *check, const char *rule, int error_number);

/* Each returns 0, or a negative errno when the check cannot go on. */
int check_read_extents(struct check *check); /* extents.c: fills `used` and `told` */
int check_walk_trees(struct check *check);   /* trees.c: fills `made` and `blocks` */
int check_references(struct check *check);   /* references.c: compares them */
int check_space(struct check *check);	     /* space.c: device, chunks, block groups */
int check_free_space(struct check *check);   /* freespace.c */
int check_subvolumes(struct check *check);   /* subvolumes.c: where each is */
int check_virtual_file(struct check *check); /* virtual.c: rules for seeds only */
