/* SPDX-License-Identifier: MIT */
/* Small files with certificates and credentials, and the protection of what was read. */
#pragma once

#include <stdbool.h>
#include <stddef.h>

#include "base/error.h"

struct secret {
	char *text; /* ends in a NUL that `length` does not count; NULL: nothing was read */
	size_t length;
};

/*
 * Reads a file of 1 byte to 1 MiB. `owner_only`: it must belong to this user or root, and nobody
 * else may read it. May wait for the disk. Returns 0, or a negative errno with the error filled in.
 */
int secret_read(const char *path, bool owner_only, struct secret *secret, struct error *error);
/* Overwrites and frees it. */
void secret_clear(struct secret *secret);
/* Does the same with a string, which may be NULL. */
void secret_free(char *text);

/*
 * Finds the first line that is not empty, and cuts the text at its end. Returns 0, or -EINVAL (the
 * error does not contain the text) when there is none, or it has characters that are invalid in a
 * header.
 */
int secret_line(const char *path, const struct secret *secret, char **line, struct error *error);

/*
 * From now on this process dumps no core, and other users' debuggers cannot attach to it, unless
 * its owner needs /proc. Any thread may call this, any number of times.
 */
void secret_guard_process(void);

/*
 * From now on, what jansson frees is overwritten: copies of tokens, passwords and files with them.
 * To be called before there are other threads, or any JSON.
 */
void secret_guard_json(void);
