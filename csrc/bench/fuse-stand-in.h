/* SPDX-License-Identifier: MIT */
/* One file in FUSE, whose content is in memory: as little as a server can do. */
#ifndef BENCH_FUSE_STAND_IN_H
#define BENCH_FUSE_STAND_IN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "bench/fuse_uapi.h"

enum {
	STAND_IN_MAX_BYTES = 128 << 10, /* of one request */
	STAND_IN_INODE = 2,
};

struct stand_in {
	int fuse_fd;
	uint8_t *content;
	uint64_t size;
	bool passthrough; /* reads and writes do not come here */
	int backing_id;	  /* what the kernel reads and writes then */
	bool over_rings;  /* they come through io_uring */
};

/* What is sent back. `data` points into `small`, or into the content. */
struct answer {
	int error; /* a negative errno, or 0 */
	bool none; /* nothing is to be sent */
	const void *data;
	size_t size;
	union {
		struct bench_init_out init;
		struct fuse_entry_out entry;
		struct fuse_attr_out attributes;
		struct bench_open_out open;
		struct fuse_write_out write;
		struct fuse_statfs_out statistics;
	} small;
};

/* `operands` are those of the operation, `payload` a name, or the bytes to write. */
void stand_in_answer(const struct stand_in *server, const struct fuse_in_header *request,
		     const void *operands, const void *payload, struct answer *answer);

/* A thread for each CPU that there may be. Returns 0, or a negative errno; they never end. */
int stand_in_start_rings(const struct stand_in *server);

#endif
