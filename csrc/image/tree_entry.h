/* SPDX-License-Identifier: MIT */
/* What is read of a tree of files, and who takes it (tree.h). */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct tree_attribute {
	const char *name; /* NB: not terminated */
	const uint8_t *value;
	uint16_t name_bytes;
	uint16_t value_bytes;
};

/* A part of a file that is no hole. */
struct tree_region {
	uint64_t offset, bytes;
};

/* It belongs to the reader, and lasts until the callback returns. */
struct tree_entry {
	const char *path;  /* from the top on, which is "" */
	const char *first; /* another name of the same file, which came before; else NULL */
	int64_t mtime_s;
	uint32_t mtime_ns;
	uint32_t mode;
	uint32_t uid, gid;
	uint32_t major, minor; /* of devices */
	uint64_t bytes;	       /* of files */
	const char *target;    /* of symbolic links */
	/* Of what came before as `first`, there are no attributes and regions. */
	const struct tree_attribute *attributes; /* in the order of the bytes of their names */
	size_t attribute_count;
	const struct tree_region *regions; /* of files: ascending, within `bytes` */
	size_t region_count;
};

/* A part of a file that lies in an extent of its own on the device. */
struct tree_extent {
	uint64_t offset, bytes; /* of the file */
	uint64_t logical, stored_bytes;
	uint64_t begin; /* where in the extent, unpacked, these bytes begin */
	bool is_compressed;
};

/* A negative result ends the reading, and is returned. */
struct tree_visitor {
	int (*entry)(struct tree_visitor *visitor, const struct tree_entry *entry);
	/* The bytes of an entry's regions, in order. */
	int (*data)(struct tree_visitor *visitor, uint64_t offset, const void *data, size_t bytes);
	/* If it is not NULL, it is called for what is not inline, and `data`, which may be NULL
	   then, for what is. */
	int (*extent)(struct tree_visitor *visitor, const struct tree_entry *entry,
		      const struct tree_extent *extent);
	/* After the last bytes of each entry that has regions. */
	int (*end)(struct tree_visitor *visitor, const struct tree_entry *entry);
};
