/* SPDX-License-Identifier: MIT */
/*
 * Writes a file that gets its name only when it is complete. Until then it has no name at all, if
 * the file system allows that, so that even a killed program leaves nothing behind.
 */
#pragma once

#include <limits.h>
#include <signal.h>
#include <stdbool.h>

struct outfile {
	int fd; /* open for reading and writing */
	int directory_fd;
	char name[NAME_MAX + 1];
	char temporary_name[64]; /* "": the file has none */
	sigset_t blocked_before;
	bool signals_blocked;
};

#define OUTFILE_CLOSED ((struct outfile){ .fd = -1, .directory_fd = -1 })

/*
 * Creates a nameless file in the directory of `path`. With `named`, or without O_TMPFILE, it gets a
 * temporary name. Returns 0, -ENOENT if there is no such directory, or another error of open(2).
 */
int outfile_open(struct outfile *out, const char *path, bool named);

/* Gives the file its name. Returns -EEXIST if that is taken and `replace` is not set. */
int outfile_publish(struct outfile *out, bool replace);

/* Closes the file, and removes it unless it was published. May be called twice. */
void outfile_close(struct outfile *out);
