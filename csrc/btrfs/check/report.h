/* SPDX-License-Identifier: MIT */
/* The report of a check: violations, notes and counts. */
#pragma once

#include <stddef.h>
#include <stdint.h>

/* Further violations are counted, but their texts are not kept. */
enum { REPORT_VIOLATIONS_MAX = 1000 };

/*
 * The rules, named as in reports. Each comment says what has to hold. What any btrfs has to keep,
 * extents and their references, free space, devices and block groups, is left to `btrfs check`.
 */
#define RULE_SUPERBLOCK "superblock"
#define RULE_MIRROR "superblock-mirror"		/* mirrors are there and equal */
#define RULE_SUPER_OVERLAP "superblock-overlap" /* no virtual data are in their place */
#define RULE_LOG_TREE "log-tree"		/* there is none to replay */
#define RULE_TREE "tree"			/* trees can be walked, checksums match */
#define RULE_COPY "tree-block-copy"		/* the copies of DUP are equal */
#define RULE_CHUNK_LENGTH "chunk-length"	/* kernels accept it */
#define RULE_SEEDING "seeding"			/* the superblock says that it is a seed */
#define RULE_LAYOUT "layout"			/* it is of a known strategy */
#define RULE_SUBVOLUME "subvolume"		/* the default one exists */
#define RULE_FILE "virtual-file"		/* its inode, flags and name */
#define RULE_FILE_EXTENT "virtual-file-extent"	/* regular, whole, without checksums */
#define RULE_COVER "virtual-file-cover"		/* extents cover the file, without gap or overlap */
#define RULE_ORDER "virtual-file-order"	     /* file, logical and physical offsets rise together */
#define RULE_MAPPING "mapping"		     /* mega-extent: logical is physical */
#define RULE_CHUNK_EXTENT "extent-per-chunk" /* mega-extent: one, at the chunk's start */

struct violation {
	const char *rule;
	char *text; /* names the structure and the value */
};

struct report {
	struct violation *violations;
	size_t count; /* violations with a text */
	uint64_t total;
	const char *note; /* what could not be checked, and why; or NULL */
	uint64_t tree_blocks;
};

void report_deinit(struct report *report);
void report_add(struct report *report, const char *rule, const char *format, ...)
	__attribute__((format(printf, 3, 4)));
