/* SPDX-License-Identifier: MIT */
/*
 * The tree of an image in memory: sources fill it, emission reads it. It knows neither where the
 * tree comes from nor what file system it becomes.
 *
 * Inodes are numbered from MODEL_ROOT on, in the order in which they were added; no number is used
 * twice, also not over layers. The model always is the tree after the layer that was applied last:
 * what a layer removes has no links any more, and model_next() passes it over.
 *
 * Pointers to inodes and entries stay valid until model_deinit(). Names, targets of symbolic links
 * and attributes are bytes of any value in arenas, which only grow. A model belongs to one thread
 * at a time.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/stat.h>

#include "base/error.h"
#include "image/arena.h"
#include "image/index.h"
#include "image/pool.h"

enum {
	MODEL_ROOT = 256,      /* the top directory; it has no name, and one link */
	MODEL_INDEX_FIRST = 2, /* of a directory's entries: "." and ".." have 0 and 1 */
	MODEL_NAME_BYTES_MAX = 255,
	MODEL_TARGET_BYTES_MAX = 4095,
	MODEL_ATTRIBUTE_BYTES_MAX = 65536, /* of a value, XATTR_SIZE_MAX */
};

struct model_limits {
	uint32_t inodes;  /* over all layers */
	uint32_t entries; /* names, over all layers */
};

/* What an inode has beside its names and content. */
struct model_stat {
	/* Since 1970. Other times are not kept: two builds of one tree would differ by them. */
	int64_t mtime_s;
	uint32_t mtime_ns;
	uint32_t mode; /* type and permissions, as st_mode has them */
	uint32_t uid, gid;
	uint32_t major, minor; /* of devices */
};

/* Where the bytes of a regular file are. */
enum model_content {
	MODEL_HOLE,    /* nowhere: the file is empty, or one hole */
	MODEL_SPOOLED, /* to be inline: in the spool */
	MODEL_EXTENTS, /* in the data object; what no extent covers is a hole */
};

struct model_inode {
	int64_t mtime_s;
	uint64_t bytes; /* of a file; of a link's target; of a directory's names */
	uint32_t mtime_ns;
	uint32_t mode;
	uint32_t uid, gid;
	uint32_t links;	     /* how many names; 0: it is gone */
	uint32_t name;	     /* an entry, the one that was added last; 0: none */
	uint32_t attributes; /* for model_attribute_next(); 0: none */
	uint16_t layer;	     /* that set what it has */
	uint8_t content;     /* enum model_content */
	uint8_t compression; /* of what is spooled, in the sense of `data` */
	union {
		struct {
			uint64_t offset;
			uint32_t stored_bytes; /* `bytes` of the file are this many in the spool */
		} spool;
		struct {
			uint32_t first, count; /* for model_extent() */
		} extents;
		struct {
			uint32_t first, last; /* entries, in the order of their index; 0: none */
			uint32_t next_index;
		} directory;
		struct {
			uint32_t major, minor;
		} device;
		uint32_t target; /* for model_target() */
	};
};

/* A name of an inode. Entries are numbered from 1 on. */
struct model_entry {
	uint32_t parent, inode;			   /* inode numbers */
	uint32_t next, previous;		   /* in the directory; 0: none */
	uint32_t next_of_inode, previous_of_inode; /* among the inode's names; 0: none */
	uint32_t index; /* in the directory, unique there and ascending */
	uint32_t name;	/* in the arena; for model_name() */
	uint16_t layer; /* that added it */
	uint8_t name_bytes;
};

/* A part of a file that is one piece of the data object, and all used. */
struct model_extent {
	uint64_t file_offset;
	uint64_t data_offset;
	uint32_t bytes;	       /* of the file; with the last one, it may end behind the file */
	uint32_t stored_bytes; /* in the data object */
	uint8_t compression;   /* in the sense of `data`; 0: none */
};

struct model_attribute {
	const char *name; /* NB: not terminated */
	const uint8_t *value;
	uint16_t name_bytes;
	uint32_t value_bytes;
};

struct model {
	struct model_limits limits;
	uint16_t layer; /* the one that is applied now, from 1 on */
	uint64_t live_inodes;
	struct pool inodes, entries, extents;
	struct arena names, attributes;
	struct index by_name, by_attributes;
};

/* The tree has a top directory at once, of root's, with mode 0755 and time 0. */
int model_init(struct model *model, const struct model_limits *limits, struct error *error);
void model_deinit(struct model *model);

/* What is added from now on belongs to the next layer. The first one needs no call. */
int model_begin_layer(struct model *model, struct error *error);

/* ---- Reading ---- */

static inline struct model_inode *model_inode(const struct model *model, uint32_t number)
{
	return pool_at(&model->inodes, number - MODEL_ROOT);
}

static inline struct model_entry *model_entry(const struct model *model, uint32_t number)
{
	return pool_at(&model->entries, number - 1);
}

static inline const char *model_name(const struct model *model, const struct model_entry *entry)
{
	return arena_at(&model->names, entry->name);
}

static inline const char *model_target(const struct model *model, const struct model_inode *inode)
{
	return arena_at(&model->names, inode->target);
}

static inline const struct model_extent *model_extent(const struct model *model, uint32_t number)
{
	return pool_at(&model->extents, number);
}

/* The lowest inode number above `number` that has links; 0: none. Begin with 0. */
uint32_t model_next(const struct model *model, uint32_t number);

/*
 * Goes through an inode's attributes, ordered by the bytes of their names. `*place` is the inode's
 * `attributes` at first. Returns false behind the last one.
 */
bool model_attribute_next(const struct model *model, uint32_t *place,
			  struct model_attribute *attribute);

/* Returns the entry, or 0. */
uint32_t model_find(const struct model *model, uint32_t parent, const char *name,
		    size_t name_bytes);

/* Writes the path of an entry, from the top directory on, for messages; cut on the left. */
void model_path(const struct model *model, uint32_t entry, char *path, size_t size);

/* ---- Filling: each returns 0 or a negative errno, with an error ---- */

/* Adds an inode that has no name yet, of any type. */
int model_add(struct model *model, const struct model_stat *stat, uint32_t *number,
	      struct error *error);

/* Changes what an inode has; its type stays. It belongs to the present layer then. */
void model_set_stat(struct model *model, uint32_t number, const struct model_stat *stat);

/* `name` must not be in the directory; it is neither empty, "." nor "..", and has no "/". */
int model_link(struct model *model, uint32_t parent, const char *name, size_t name_bytes,
	       uint32_t number, struct error *error);

/* Removes one name, with all that is below it if it is the name of a directory. */
void model_remove(struct model *model, uint32_t entry);

/* The same, but names that the present layer added stay, with the directories that lead to them. */
void model_remove_lower(struct model *model, uint32_t entry);
/* The same for all entries of a directory, which stays itself. */
void model_empty_lower(struct model *model, uint32_t directory);

int model_set_target(struct model *model, uint32_t number, const char *target, size_t bytes,
		     struct error *error);

/* Replaces all attributes; they are sorted in place. Equal sets are stored once. */
int model_set_attributes(struct model *model, uint32_t number, struct model_attribute *attributes,
			 size_t count, struct error *error);

/* ---- Content: of `data`; the inode's `bytes` are known before ---- */

void model_set_spooled(struct model *model, uint32_t number, uint64_t offset, uint32_t stored_bytes,
		       uint8_t compression);

/* NB: those of one file come one behind the other, in order; in between, no other file gets any. */
int model_add_extent(struct model *model, uint32_t number, const struct model_extent *extent,
		     struct error *error);
