/* SPDX-License-Identifier: MIT */
/* What the FUSE connection answers: a directory with one file, which is the address space. */
#ifndef FRONTEND_FUSE_SESSION_H
#define FRONTEND_FUSE_SESSION_H

#include <stdbool.h>
#include <stdint.h>
#include <time.h>

#include "server/engine.h"

struct fuse_session;

enum { FUSE_FILE_INODE = 2 }; /* the root's is 1 */

struct fuse_export {
	const struct engine *engine;
	uint32_t max_io_bytes;
	bool page_cache;      /* those who open it read through that */
	struct timespec time; /* of the file */
	char name[32];	      /* of the file */
	unsigned opened;      /* atomic: how many have it open */
	int introduced_fd;    /* eventfd: written once `minor` is known */
	unsigned minor;	      /* of the protocol that the kernel speaks; 0: not known */
};

/*
 * `export` must outlive the session, which takes ownership of `fuse_fd`. NULL when memory is short.
 */
struct fuse_session *fuse_export_session(struct fuse_export *export, int fuse_fd);

#endif
