/* SPDX-License-Identifier: MIT */
/* The report of a check: violations, notes and counts. */
#pragma once

#include <stddef.h>
#include <stdint.h>

/* Further violations are counted, but their texts are not kept. */
enum { REPORT_VIOLATIONS_MAX = 1000 };

/* The rules, named as in reports. Each comment says what has to hold. */
#define RULE_SUPERBLOCK "superblock"
#define RULE_MIRROR "superblock-mirror"		/* mirrors are there and equal */
#define RULE_SUPER_OVERLAP "superblock-overlap" /* nothing else is in their place */
#define RULE_LOG_TREE "log-tree"		/* there is none to replay */
#define RULE_TREE "tree"			/* trees can be walked, checksums match */
#define RULE_COPY "tree-block-copy"		/* the copies of DUP are equal */
#define RULE_DEVICE "device"			/* device item, superblock and device tree agree */
#define RULE_CHUNK_LENGTH "chunk-length"	/* kernels accept it */
#define RULE_DEV_EXTENT "device-extent"		/* one for each stripe of a chunk */
#define RULE_BLOCK_GROUP "block-group"		/* one for each chunk */
#define RULE_USAGE "block-group-usage"		/* it is the sum of the extents */
#define RULE_BYTES_USED "bytes-used"		/* the superblock has the sum of usage */
#define RULE_EXTENT "extent"	     /* in a chunk of its kind, no overlap, well-formed */
#define RULE_REFERENCE "reference"   /* each back reference has its pointer, and vice versa */
#define RULE_FREE_SPACE "free-space" /* it lists all that no extent uses */
#define RULE_SEEDING "seeding"	     /* the superblock says that it is a seed */
#define RULE_LAYOUT "layout"	     /* it is of a known strategy */
#define RULE_SUBVOLUME "subvolume"   /* references and entry agree; the default one exists */
#define RULE_FILE "virtual-file"     /* its inode, flags and name */
#define RULE_FILE_EXTENT "virtual-file-extent" /* regular, whole, without checksums */
#define RULE_COVER "virtual-file-cover"	       /* extents cover the file, without gap or overlap */
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
	char **notes; /* what could not be checked and why, and what is odd but harmless */
	size_t note_count;
	uint64_t tree_blocks;
	uint64_t extents;
	uint64_t references;
};

void report_deinit(struct report *report);
void report_add(struct report *report, const char *rule, const char *format, ...)
	__attribute__((format(printf, 3, 4)));
void report_note(struct report *report, const char *format, ...)
	__attribute__((format(printf, 2, 3)));
