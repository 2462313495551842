/* SPDX-License-Identifier: MIT */
/* Small files with certificates and credentials, and what keeps them where they belong. */
#ifndef LAZY_MIRROR_SECRET_H
#define LAZY_MIRROR_SECRET_H

#include <stdbool.h>
#include <stddef.h>

#include "lazy/complaint.h"

struct secret {
	char *text; /* ends in a NUL that `length` does not count; NULL: nothing has been read */
	size_t length;
};

/*
 * Read a file of 1 byte to 1 MiB. `owner_only`: it must be this user's or root's, and nobody else may
 * read it. May wait for the disk. Returns 0 or a negative errno with the complaint filled in.
 */
int secret_read(const char *path, bool owner_only, struct secret *secret,
		struct complaint *complaint);
/* Overwrites it, and frees it. */
void secret_clear(struct secret *secret);
/* The same of a string; NULL is fine. */
void secret_free(char *text);

/*
 * Cut the text at the end of its first line that is not empty. Returns 0, or -EINVAL (complaint
 * without the text): there is none, or it has characters that no header may have.
 */
int secret_line(const char *path, const struct secret *secret, char **line,
		struct complaint *complaint);

/*
 * From now on this process leaves no core dump, and, where that takes nothing from its owner, cannot be
 * looked into by other users' debuggers. Any thread, any number of times.
 */
void secret_guard_process(void);

/*
 * From now on what jansson frees is overwritten: copies of tokens, passwords and files that have them.
 * Before there are other threads, and JSON.
 */
void secret_guard_json(void);

#endif
