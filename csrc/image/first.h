/* SPDX-License-Identifier: MIT */
/*
 * Content that is to lie at the front of the data object, so that what is read when the image is
 * started comes in few requests. Sources are read twice then: the first time, `data` hands on all
 * pieces of the wanted files, and those that a wanted range touches are kept in a file without a
 * name. They are placed in the order of the ranges, before anything else. The second time, equal
 * content finds them in the object.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "image/model.h"
#include "image/pool.h"
#include "image/spool.h"

struct first_range {
	const char *path; /* from the top of the image on, without "/" in front; the caller's */
	uint64_t offset, length;
	size_t rank; /* first_open() sets it: the place in the wanted order */
};

/* A piece of content that is kept. */
struct first_piece {
	uint64_t file_offset, place; /* `place` is in the spool */
	size_t path, rank;	     /* `path` is the first range of its file */
	uint32_t bytes, reading;
};

struct first {
	struct first_range *ranges; /* ordered by path, then by rank; the caller's */
	size_t count;
	uint32_t *readings; /* of each path's first range: the last reading of that file */
	uint32_t reading;
	size_t wanted, wanted_count; /* ranges of the present file */
	struct spool spool;
	struct pool pieces;
	char *path;
};

/* The functions return 0 or a negative errno. `directory` is where the spool is made. */
int first_open(struct first *first, struct first_range *ranges, size_t count,
	       const char *directory);
void first_close(struct first *first);

/* Begins a file, whose last name is in the model. Returns whether any range of it is wanted. */
bool first_begin(struct first *first, const struct model *model, uint32_t inode);
/* Keeps a piece of the present file if a range touches it. */
int first_take(struct first *first, uint64_t file_offset, const void *bytes, uint32_t length);

/*
 * Returns `*count` pieces in the wanted order, for free(). NULL: no memory.
 * Where a later layer has replaced a file, only the pieces of the later one are among them.
 */
struct first_piece *first_sorted(const struct first *first, size_t *count);
int first_read(struct first *first, const struct first_piece *piece, void *bytes);
