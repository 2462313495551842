/* SPDX-License-Identifier: MIT */
#include "image/place.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/cleanup.h"

#define WHITEOUT ".wh."
#define WHITEOUT_RESERVED ".wh..wh."
#define WHITEOUT_OPAQUE ".wh..wh..opq"

static bool is_dots(const char *name, size_t bytes)
{
	return bytes == 2 && name[0] == '.' && name[1] == '.';
}

void place_shorten(char *path)
{
	char *end = path; /* of what is kept */
	size_t bytes;

	for (const char *at = path; *at; at += bytes + (at[bytes] == '/')) {
		bytes = strcspn(at, "/");
		if (is_dots(at, bytes)) {
			while (end > path && *--end != '/')
				;
		} else if (bytes && !(bytes == 1 && *at == '.')) {
			if (end > path)
				*end++ = '/';
			memmove(end, at, bytes);
			end += bytes;
		}
	}
	*end = '\0';
}

static int leads_out(struct error *error, const char *why)
{
	error_set_hint(error, "unpack it with `tar --extract`, which leaves such a part of a name "
			      "out, and make an image of the directory");
	return error_set(error, -EINVAL, "%s: it leads out of the tree", why);
}

/*
 * Where nothing is clamped, names of archives are not trusted as far as targets of links are: no
 * ".." at all.
 */
static int check_path(const struct placement *placement, const char *path, struct error *error)
{
	size_t bytes;

	if (strlen(path) > PLACE_PATH_BYTES_MAX)
		return error_set(error, -ENAMETOOLONG, "the name has more than %d bytes",
				 PLACE_PATH_BYTES_MAX);
	if (placement->clamps)
		return 0;
	if (*path == '/')
		return leads_out(error, "the name is absolute");
	if (!*path)
		return error_set(error, -EINVAL, "the name is empty");
	for (const char *at = path; *at; at += bytes + (at[bytes] == '/')) {
		bytes = strcspn(at, "/");
		if (is_dots(at, bytes))
			return leads_out(error, "the name has a \"..\" in it");
	}
	return 0;
}

/* A walk along a path. Targets of symbolic links are put in front of what is left of it. */
struct walk {
	const struct placement *placement;
	uint32_t directory;
	char *rest;  /* allocated */
	size_t done; /* bytes of `rest` */
	unsigned links;
	bool makes_parents;
};

static int go_up(struct walk *walk, struct error *error)
{
	const struct model *model = walk->placement->model;

	if (walk->directory == MODEL_ROOT) {
		if (walk->placement->clamps)
			return 0; /* as in the root directory */
		return error_set(error, -EINVAL,
				 "a symbolic link on the way leads out of the tree");
	}
	walk->directory = model_entry(model, model_inode(model, walk->directory)->name)->parent;
	return 0;
}

static int follow(struct walk *walk, const struct model_inode *link, struct error *error)
{
	const struct model *model = walk->placement->model;
	const char *target = model_target(model, link);
	const char *left = walk->rest + walk->done;
	char *rest;

	if (++walk->links > PLACE_LINKS_MAX)
		return error_set(error, -ELOOP, "more than %d symbolic links are on the way",
				 PLACE_LINKS_MAX);
	if (*target == '/') {
		if (!walk->placement->clamps)
			return error_set(
				error, -EINVAL,
				"the symbolic link to \"%.*s\" on the way leads out of the tree",
				link->bytes > 100 ? 100 : (int)link->bytes, target);
		walk->directory = MODEL_ROOT;
	}
	rest = malloc(link->bytes + 1 + strlen(left) + 1);
	if (!rest)
		return error_set(error, -ENOMEM, "no memory for a path");
	memcpy(rest, target, link->bytes);
	rest[link->bytes] = '/';
	memcpy(rest + link->bytes + 1, left, strlen(left) + 1);
	free(walk->rest);
	walk->rest = rest;
	walk->done = 0;
	return 0;
}

static int make_directory(struct walk *walk, const char *name, size_t bytes, struct error *error)
{
	const struct model_stat stat = { .mode = S_IFDIR | 0755,
					 .mtime_s = walk->placement->time_s };
	struct model *model = walk->placement->model;
	uint32_t number;
	int err = model_add(model, &stat, &number, error);

	if (!err)
		err = model_link(model, walk->directory, name, bytes, number, error);
	if (!err)
		walk->directory = number;
	return err;
}

/* Returns 0 with `directory` 0 when it is missing, and is not to be made. */
static int step(struct walk *walk, const char *name, size_t bytes, struct error *error)
{
	const struct model *model = walk->placement->model;
	uint32_t entry, number;

	if (!bytes || (bytes == 1 && *name == '.'))
		return 0;
	if (is_dots(name, bytes))
		return go_up(walk, error);
	entry = model_find(model, walk->directory, name, bytes);
	if (!entry) {
		if (walk->makes_parents)
			return make_directory(walk, name, bytes, error);
		walk->directory = 0;
		return 0;
	}
	number = model_entry(model, entry)->inode;
	if (S_ISLNK(model_inode(model, number)->mode))
		return follow(walk, model_inode(model, number), error);
	if (!S_ISDIR(model_inode(model, number)->mode))
		return error_set(error, -ENOTDIR, "\"%.*s\" on the way is no directory", (int)bytes,
				 name);
	walk->directory = number;
	return 0;
}

static void free_rest(struct walk *walk)
{
	free(walk->rest);
}

/* Leads to the directory; `bytes` of the path are its own name. */
static int walk_along(const struct placement *placement, const char *path, size_t bytes,
		      bool makes_parents, uint32_t *directory, struct error *error)
{
	_cleanup_(free_rest) struct walk walk = { .placement = placement,
						  .directory = MODEL_ROOT,
						  .makes_parents = makes_parents,
						  .rest = strndup(path, bytes) };

	if (!walk.rest)
		return error_set(error, -ENOMEM, "no memory for a path");
	while (walk.directory && walk.rest[walk.done]) {
		const char *name = walk.rest + walk.done;
		size_t length = strcspn(name, "/");
		int err;

		walk.done += length + (name[length] == '/');
		err = step(&walk, name, length, error);
		if (err)
			return err;
	}
	*directory = walk.directory;
	return 0;
}

/* Where the last name of the path is; "." is none, as a "/" at the end is not. */
static void split(const char *path, struct place *place)
{
	const char *end = path + strlen(path);

	*place = (struct place){ .name = path };
	while (end > path) {
		const char *start = end;

		while (start > path && start[-1] != '/')
			start--;
		place->name = start;
		if (end - start > 1 || (end - start == 1 && *start != '.')) {
			place->name_bytes = (size_t)(end - start);
			return;
		}
		end = start > path ? start - 1 : path;
	}
}

int place_find(const struct placement *placement, const char *path, bool makes_parents,
	       struct place *place, struct error *error)
{
	int err = check_path(placement, path, error);

	if (err)
		return err;
	split(path, place);
	err = walk_along(placement, path, (size_t)(place->name - path), makes_parents,
			 &place->parent, error);
	if (!err && place->parent && place->name_bytes)
		place->entry =
			model_find(placement->model, place->parent, place->name, place->name_bytes);
	return err;
}

int place_inode(const struct placement *placement, const struct place *place,
		const struct model_stat *stat, uint32_t *number, struct error *error)
{
	struct model *model = placement->model;
	int err;

	if (!place->name_bytes) {
		if (!S_ISDIR(stat->mode))
			return error_set(error, -ENOTDIR,
					 "the top of the tree must be a directory");
		*number = MODEL_ROOT;
		model_set_stat(model, *number, stat);
		return 0;
	}
	if (place->entry) {
		struct model_entry *entry = model_entry(model, place->entry);

		if (S_ISDIR(stat->mode) && S_ISDIR(model_inode(model, entry->inode)->mode)) {
			entry->layer = model->layer;
			*number = entry->inode;
			model_set_stat(model, *number, stat);
			return 0;
		}
		model_remove(model, place->entry);
	}
	err = model_add(model, stat, number, error);
	if (!err)
		err = model_link(model, place->parent, place->name, place->name_bytes, *number,
				 error);
	return err;
}

int place_link(const struct placement *placement, const struct place *place, uint32_t number,
	       struct error *error)
{
	struct model *model = placement->model;

	if (!place->name_bytes || S_ISDIR(model_inode(model, number)->mode))
		return error_set(error, -EPERM, "a hard link cannot be one to a directory");
	if (place->entry) {
		struct model_entry *entry = model_entry(model, place->entry);

		if (entry->inode == number) {
			entry->layer = model->layer;
			return 0;
		}
		model_remove(model, place->entry);
	}
	return model_link(model, place->parent, place->name, place->name_bytes, number, error);
}

static bool begins(const char *name, size_t bytes, const char *with)
{
	return bytes >= strlen(with) && !memcmp(name, with, strlen(with));
}

static bool has_reserved_parent(const char *path)
{
	for (const char *at = path; at; at = strchr(at, '/')) {
		at += *at == '/';
		if (!strncmp(at, WHITEOUT_RESERVED, strlen(WHITEOUT_RESERVED)) && strchr(at, '/'))
			return true;
	}
	return false;
}

int place_whiteout(const struct placement *placement, const char *path, struct error *error)
{
	struct place place;
	const char *name;
	size_t bytes;
	int err;

	/* AUFS kept its own files in such directories; no client takes them for content. */
	if (has_reserved_parent(path))
		return 1;
	split(path, &place);
	if (!begins(place.name, place.name_bytes, WHITEOUT))
		return 0;
	err = place_find(placement, path, false, &place, error);
	if (err)
		return err;
	if (begins(place.name, place.name_bytes, WHITEOUT_RESERVED)) {
		if (place.parent && place.name_bytes == strlen(WHITEOUT_OPAQUE) &&
		    begins(place.name, place.name_bytes, WHITEOUT_OPAQUE))
			model_empty_lower(placement->model, place.parent);
		return 1;
	}
	name = place.name + strlen(WHITEOUT);
	bytes = place.name_bytes - strlen(WHITEOUT);
	if (!bytes || (bytes == 1 && *name == '.') || is_dots(name, bytes))
		return error_set(error, -EINVAL, "a whiteout of \"%.*s\" removes no name",
				 (int)bytes, name);
	if (place.parent) {
		uint32_t entry = model_find(placement->model, place.parent, name, bytes);

		if (entry)
			model_remove_lower(placement->model, entry);
	}
	return 1;
}
