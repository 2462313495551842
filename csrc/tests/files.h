/* SPDX-License-Identifier: MIT */
/* A directory in memory whose files are changed and restored, for fuzzers of what is on disk. */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "tests/fuzz.h"

enum { FUZZ_FILES_MAX = 16 };

struct fuzz_files {
	char directory[FUZZ_DIRECTORY_BYTES];
	size_t count;
	struct fuzz_file {
		char name[256];
		uint8_t *data;
		size_t bytes;
		const uint8_t *now; /* the file, mapped; NULL: not yet */
		uint64_t inode;
	} files[FUZZ_FILES_MAX];
};

/* These end the program where the machine fails. */

/* Makes an empty directory. */
void fuzz_files_make(struct fuzz_files *files);
/* Remembers all files there. */
void fuzz_files_keep(struct fuzz_files *files);
/* Removes what was not kept, and writes what differs from what was. */
void fuzz_files_restore(struct fuzz_files *files);
/* Removes the directory. */
void fuzz_files_remove(struct fuzz_files *files);
/* Changes one file as the input says: some bytes of it, or its size. */
void fuzz_files_change(const struct fuzz_files *files, struct fuzz_input *input);
/* Writes "DIRECTORY/NAME" to `path`. */
const char *fuzz_files_path(const struct fuzz_files *files, const char *name,
			    char path[static 512]);
