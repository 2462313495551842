/* SPDX-License-Identifier: MIT */
/* Makes the answer to a request, no matter by which way the request came. */
#include <errno.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/size.h"
#include "bench/fuse-stand-in.h"

#ifndef FOPEN_PARALLEL_DIRECT_WRITES /* headers before Linux 6.2 */
#define FOPEN_PARALLEL_DIRECT_WRITES (1 << 6)
#endif

/* The kernel may cache for ever, as nothing changes without it. */
static const uint64_t cache_seconds = 1000000000;

static struct fuse_attr attributes_of(const struct stand_in *server, uint64_t inode)
{
	bool root = inode == FUSE_ROOT_ID;

	return (struct fuse_attr){
		.ino = inode,
		.size = root ? 0 : server->size,
		.blocks = root ? 0 : server->size >> 9,
		.mode = root ? S_IFDIR | 0700 : S_IFREG | 0600,
		.nlink = root ? 2 : 1,
		.uid = geteuid(),
		.gid = getegid(),
		.blksize = BLOCK_BYTES,
	};
}

static void send(struct answer *answer, size_t size)
{
	answer->data = &answer->small;
	answer->size = size;
}

static void init(const struct stand_in *server, const struct fuse_init_in *wanted,
		 struct answer *answer)
{
	uint64_t offered = wanted->flags | (uint64_t)wanted->flags2 << 32;
	uint64_t flags = FUSE_INIT_EXT | FUSE_ASYNC_READ | FUSE_BIG_WRITES | FUSE_MAX_PAGES |
			 FUSE_ASYNC_DIO;

	if (server->passthrough)
		flags |= FUSE_PASSTHROUGH;
	if (server->over_rings)
		flags |= FUSE_OVER_IO_URING;
	if (flags & ~offered) {
		answer->error = -EPROTO;
		return;
	}
	answer->small.init = (struct bench_init_out){
		.major = FUSE_KERNEL_VERSION,
		.minor = wanted->minor,
		.max_readahead = wanted->max_readahead,
		.flags = (uint32_t)flags,
		.flags2 = (uint32_t)(flags >> 32),
		.max_background = 1024,
		.congestion_threshold = 1024,
		.max_write = STAND_IN_MAX_BYTES,
		.max_pages = STAND_IN_MAX_BYTES / BLOCK_BYTES,
		.time_gran = 1,
		.max_stack_depth = server->passthrough ? 1 : 0,
	};
	send(answer, sizeof(answer->small.init));
}

static void look_up(const struct stand_in *server, const char *name, struct answer *answer)
{
	if (strcmp(name, "file") != 0) {
		answer->error = -ENOENT;
		return;
	}
	answer->small.entry = (struct fuse_entry_out){
		.nodeid = STAND_IN_INODE,
		.entry_valid = cache_seconds,
		.attr_valid = cache_seconds,
		.attr = attributes_of(server, STAND_IN_INODE),
	};
	send(answer, sizeof(answer->small.entry));
}

static void open_file(const struct stand_in *server, struct answer *answer)
{
	answer->small.open = (struct bench_open_out){
		.open_flags = server->passthrough ? FOPEN_PASSTHROUGH :
						    FOPEN_DIRECT_IO | FOPEN_PARALLEL_DIRECT_WRITES,
		.backing_id = server->backing_id,
	};
	send(answer, sizeof(answer->small.open));
}

/* Returns how much of `length` is within the file. */
static uint32_t within(const struct stand_in *server, uint64_t offset, uint32_t length)
{
	uint64_t left = offset < server->size ? server->size - offset : 0;

	return left < length ? (uint32_t)left : length;
}

static void read_file(const struct stand_in *server, const struct fuse_read_in *range,
		      struct answer *answer)
{
	answer->data = server->content + range->offset;
	answer->size = within(server, range->offset, range->size);
}

static void write_file(const struct stand_in *server, const struct fuse_write_in *range,
		       const void *bytes, struct answer *answer)
{
	if (within(server, range->offset, range->size) != range->size) {
		answer->error = -ENOSPC;
		return;
	}
	memcpy(server->content + range->offset, bytes, range->size);
	answer->small.write = (struct fuse_write_out){ .size = range->size };
	send(answer, sizeof(answer->small.write));
}

void stand_in_answer(const struct stand_in *server, const struct fuse_in_header *request,
		     const void *operands, const void *payload, struct answer *answer)
{
	answer->error = 0;
	answer->none = false;
	/* NB: writev(2) checks the address even if the size is 0. */
	answer->data = NULL;
	answer->size = 0;
	switch (request->opcode) {
	case FUSE_INIT:
		init(server, operands, answer);
		break;
	case FUSE_LOOKUP:
		look_up(server, payload, answer);
		break;
	case FUSE_GETATTR:
		answer->small.attributes = (struct fuse_attr_out){
			.attr_valid = cache_seconds,
			.attr = attributes_of(server, request->nodeid),
		};
		send(answer, sizeof(answer->small.attributes));
		break;
	case FUSE_OPEN:
		open_file(server, answer);
		break;
	case FUSE_READ:
		read_file(server, operands, answer);
		break;
	case FUSE_WRITE:
		write_file(server, operands, payload, answer);
		break;
	case FUSE_STATFS:
		answer->small.statistics = (struct fuse_statfs_out){};
		send(answer, sizeof(answer->small.statistics));
		break;
	case FUSE_RELEASE:
		break;
	case FUSE_FORGET:
	case FUSE_BATCH_FORGET:
	case FUSE_INTERRUPT:
		answer->none = true;
		break;
	default:
		/* FSYNC, too, as the content is only in memory. The kernel does not ask again. */
		answer->error = -ENOSYS;
	}
}
