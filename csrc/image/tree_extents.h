/* SPDX-License-Identifier: MIT */
/*
 * Prints where the content of a tree's files lies. A line is for an extent, or for another name of
 * a file whose extents have been printed; with tabs between them, it has
 *
 *   the path, offset and bytes in the file, logical address and stored bytes of the extent
 *   the path, the path that came before
 *
 * Paths are written as in tree_list.h. Content is not read, so that the image need not have any.
 */
#pragma once

#include <stdio.h>

#include "base/error.h"
#include "image/tree_entry.h"

struct extent_lister {
	struct tree_visitor visitor; /* give its address to tree_read() */
	FILE *out;
	struct error *error;
};

void extent_lister_init(struct extent_lister *lister, FILE *out, struct error *error);
/* Returns 0 or a negative errno, with an error. */
int extent_lister_finish(struct extent_lister *lister);
