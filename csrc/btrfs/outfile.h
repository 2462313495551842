/* SPDX-License-Identifier: MIT */
/*
 * A file that appears under its name only when it is complete. Where the file system allows, it
 * has no name at all until then, so that even a killed program leaves nothing.
 */
#ifndef BTRFS_OUTFILE_H
#define BTRFS_OUTFILE_H

#include <limits.h>
#include <signal.h>
#include <stdbool.h>

struct outfile {
	int fd; /* open for reading and writing */
	int directory_fd;
	char name[NAME_MAX + 1];
	char temporary_name[64]; /* "": the file has none yet */
	sigset_t blocked_before;
	bool signals_blocked;
};

#define OUTFILE_CLOSED ((struct outfile){ .fd = -1, .directory_fd = -1 })

/*
 * Create a nameless file in the directory of `path`; `named` gives it a temporary name as on file
 * systems without O_TMPFILE. -ENOENT: no such directory; or what open() says.
 */
int outfile_open(struct outfile *out, const char *path, bool named);

/* Give it its name. -EEXIST: something has that name, and `replace` is not set. */
int outfile_publish(struct outfile *out, bool replace);

/* Close it; unless published, it is gone. May be called twice. */
void outfile_close(struct outfile *out);

#endif
