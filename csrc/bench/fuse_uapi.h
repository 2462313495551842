/* SPDX-License-Identifier: MIT */
/*
 * Additions to <linux/fuse.h> since Linux 6.1, whose header Debian 12 has. Values are from the
 * kernel's include/uapi/linux/fuse.h.
 */
#ifndef BENCH_FUSE_UAPI_H
#define BENCH_FUSE_UAPI_H

#include <linux/fuse.h>
#include <linux/ioctl.h>
#include <stdint.h>

#ifndef FUSE_PASSTHROUGH /* 6.9 */
#define FUSE_PASSTHROUGH (1ULL << 37)
#define FOPEN_PASSTHROUGH (1 << 7)

struct fuse_backing_map {
	int32_t fd;
	uint32_t flags;
	uint64_t padding;
};

#define FUSE_DEV_IOC_BACKING_OPEN _IOW(FUSE_DEV_IOC_MAGIC, 1, struct fuse_backing_map)
#endif
#ifndef FUSE_DEV_IOC_MAGIC
#define FUSE_DEV_IOC_MAGIC 229
#endif

#ifndef FUSE_OVER_IO_URING /* 6.14 */
#define FUSE_OVER_IO_URING (1ULL << 41)
#define FUSE_URING_IN_OUT_HEADER_SZ 128
#define FUSE_URING_OP_IN_OUT_SZ 128

/* What the kernel and the server tell each other about an entry of a ring. */
struct fuse_uring_ent_in_out {
	uint64_t flags;
	uint64_t commit_id;
	uint32_t payload_sz;
	uint32_t padding;
	uint64_t reserved;
};

struct fuse_uring_req_header {
	char in_out[FUSE_URING_IN_OUT_HEADER_SZ]; /* struct fuse_in_header, fuse_out_header */
	char op_in[FUSE_URING_OP_IN_OUT_SZ];
	struct fuse_uring_ent_in_out ring_ent_in_out;
};

enum fuse_uring_cmd {
	FUSE_IO_URING_CMD_INVALID = 0,
	FUSE_IO_URING_CMD_REGISTER = 1,
	FUSE_IO_URING_CMD_COMMIT_AND_FETCH = 2,
};

/* It is in the 80 bytes for commands of a 128-byte submission entry. */
struct fuse_uring_cmd_req {
	uint64_t flags;
	uint64_t commit_id;
	uint16_t qid;
	uint8_t padding[6];
};
#endif

/*
 * These structures are as in Linux 6.9 and later. Their last fields are unused or padding in older
 * headers. With these definitions, a build does not depend on the header's version.
 */
struct bench_init_out {
	uint32_t major, minor;
	uint32_t max_readahead;
	uint32_t flags;
	uint16_t max_background, congestion_threshold;
	uint32_t max_write;
	uint32_t time_gran;
	uint16_t max_pages, map_alignment;
	uint32_t flags2;
	uint32_t max_stack_depth;
	uint32_t unused[6];
};

struct bench_open_out {
	uint64_t fh;
	uint32_t open_flags;
	int32_t backing_id;
};

_Static_assert(sizeof(struct bench_init_out) == 64, "as long as the kernel's");
_Static_assert(sizeof(struct bench_open_out) == sizeof(struct fuse_open_out), "the kernel's");

#endif
