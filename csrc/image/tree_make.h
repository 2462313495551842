/* SPDX-License-Identifier: MIT */
/*
 * Makes a tree again, in a directory of a mounted btrfs. The files' extents become clones of a
 * file that has the image's data object somewhere in it: no data are read or written for them.
 * What is inline is written. Owners, modes, times and attributes are those of the image.
 *
 * Nobody else can come to the directory meanwhile: the caller has it closed to all others.
 */
#pragma once

#include <stdint.h>

#include "base/error.h"
#include "image/tree.h"

struct made_directory;

struct tree_make_options {
	int target;	      /* an empty directory; -1: only check whether the tree can be made */
	int data;	      /* the file that has the data object, */
	uint64_t data_offset; /* beginning here */
	uint64_t data_bytes;
	/* Called with the number of entries that were made, now and then. */
	void (*progress)(uint64_t entries);
};

struct tree_maker {
	struct tree_visitor visitor; /* give its address to tree_read() */
	struct error *error;
	struct tree_make_options options;
	/* Outputs. */
	uint64_t entries, cloned_bytes, written_bytes;
	/* The directories on the way; the last one is open. */
	struct made_directory *stack;
	size_t depth, stack_capacity;
	int directory;
	int file; /* the present entry, if it is a file that has content */
	/* The range to clone next: neighbours are cloned at once. */
	uint64_t clone_offset, clone_begin, clone_bytes;
	/* Of the last file or directory; directories above it begin it. */
	char path[TREE_PATH_BYTES_MAX + 1];
};

void tree_maker_init(struct tree_maker *maker, const struct tree_make_options *options,
		     struct error *error);
void tree_maker_deinit(struct tree_maker *maker);

/* Gives the last directories their attributes. Returns 0 or a negative errno, with an error. */
int tree_maker_finish(struct tree_maker *maker);
