/* SPDX-License-Identifier: MIT */
/* The file system of the FUSE connection: a directory with one file, which is the address space. */
#pragma once

#include <stdbool.h>
#include <stdint.h>
#include <time.h>

#include "server/engine.h"

struct fuse_session;

enum { FUSE_FILE_INODE = 2 }; /* the root's is 1 */

struct fuse_export {
	const struct engine *engine;
	uint32_t max_io_bytes;
	struct timespec time; /* of the file */
	char name[32];	      /* of the file */
	unsigned opened;      /* atomic: number of opens */
	int introduced_fd;    /* eventfd, written once `minor` is known */
	unsigned minor;	      /* of the kernel's protocol; 0: unknown */
};

/*
 * Makes a session, which takes ownership of `fuse_fd`; `export` must outlive it. Returns NULL when
 * memory is short.
 */
struct fuse_session *fuse_export_session(struct fuse_export *export, int fuse_fd);
