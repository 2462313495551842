/* SPDX-License-Identifier: MIT */
/*
 * Reads a subvolume of an image as a tree of files, without mounting it. Entries come in one
 * order, whatever made the image: a directory before what is in it, and names within a directory
 * by their bytes. Nothing of the image is trusted: what is damaged gives an error with its path.
 *
 * In memory are the names of the directories on the way, one file's extents and attributes, and
 * one path for each file that has several names, until the last one came.
 */
#pragma once

#include <stdint.h>

#include "base/error.h"
#include "btrfs/reader.h"
#include "image/tree_entry.h"

enum { TREE_PATH_BYTES_MAX = 65535 };

/* Returns 0 or a negative errno, with an error unless it is the visitor's. */
int tree_read(struct reader *reader, uint64_t subvolume, struct tree_visitor *visitor,
	      struct error *error);
