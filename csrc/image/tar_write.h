/* SPDX-License-Identifier: MIT */
/*
 * Writes a tree as a tar in the format of POSIX (pax), with records for what its headers cannot
 * hold, and holes as GNU tar has them (GNU.sparse.major=1). Equal trees make equal bytes.
 */
#pragma once

#include <stdio.h>

#include "base/error.h"
#include "image/tree_entry.h"

struct tar_writer {
	struct tree_visitor visitor; /* give its address to tree_read() */
	FILE *out;
	struct error *error;
	/* What no tar can hold, and was left out. */
	uint64_t sockets;
	char *records;
	size_t record_bytes, record_capacity;
	uint64_t written_bytes; /* of the present file's content */
};

void tar_writer_init(struct tar_writer *writer, FILE *out, struct error *error);
void tar_writer_deinit(struct tar_writer *writer);

/* Writes the end. Returns 0 or a negative errno, with an error, as the visitor's functions do. */
int tar_writer_finish(struct tar_writer *writer);
