/* SPDX-License-Identifier: MIT */
/* A minimal FUSE server, of one file whose content is in memory. */
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
	bool passthrough; /* reads and writes are not sent to us */
	int backing_id;	  /* of the file that the kernel reads and writes instead */
	bool over_rings;  /* requests come through io_uring */
};

/* An answer. `data` points to `small`, or into the content. */
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

/* `operands` is the operation's structure, `payload` a name, or the bytes to write. */
void stand_in_answer(const struct stand_in *server, const struct fuse_in_header *request,
		     const void *operands, const void *payload, struct answer *answer);

/* Starts a thread for each configured CPU. They serve until the end. Returns 0 or -errno. */
int stand_in_start_rings(const struct stand_in *server);

#endif
