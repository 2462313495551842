/* SPDX-License-Identifier: MIT */
/*
 * Where entries of a layer go in a model: paths are resolved within the tree, names replace what
 * they name, whiteouts remove what lower layers have. Nothing leads out of the tree.
 */
#pragma once

#include "image/model.h"

enum {
	PLACE_PATH_BYTES_MAX = 65536,
	PLACE_LINKS_MAX = 40, /* symbolic links on the way, as the kernel has it */
};

struct placement {
	struct model *model;
	/*
	 * Whether the tree is a root directory: what begins with "/" begins at its top, and
	 * ".." of the top is the top. Else what leads out of the tree is refused.
	 */
	bool clamps;
	int64_t time_s; /* of directories that are made on the way */
};

/* The directory that a path leads to, and the name in it, which is not followed. */
struct place {
	uint32_t parent;   /* inode number; 0: there is no such directory */
	uint32_t entry;	   /* 0: there is no such name */
	const char *name;  /* in the path */
	size_t name_bytes; /* 0: the path is the top directory itself */
};

/*
 * Makes a name of a layer relative, without "." and "..", by its letters alone: clients do this
 * before they follow links. The top is an empty name.
 */
void place_shorten(char *path);

/*
 * Resolves a path, which must be relative and without ".." unless the placement clamps. Directories
 * that are missing on the way are made if `makes_parents`. Returns 0 or a negative errno, with an
 * error.
 */
int place_find(const struct placement *placement, const char *path, bool makes_parents,
	       struct place *place, struct error *error);

/*
 * Puts an inode there. A directory takes the attributes of the one that has the name, and keeps its
 * entries; all else replaces what has the name, with what is below it. Returns its number.
 */
int place_inode(const struct placement *placement, const struct place *place,
		const struct model_stat *stat, uint32_t *number, struct error *error);

/* Gives a name to an inode that has some. */
int place_link(const struct placement *placement, const struct place *place, uint32_t number,
	       struct error *error);

/*
 * Does what an OCI layer's `.wh.NAME` and `.wh..wh..opq` are for. Returns 1 if it was one of those,
 * or another name that is reserved for such purposes; 0 if it is an ordinary name.
 */
int place_whiteout(const struct placement *placement, const char *path, struct error *error);
