/* SPDX-License-Identifier: MIT */
#include "server/frontend/fuse_takeover.h"

#include <errno.h>
#include <fcntl.h>
#include <fuse_lowlevel.h>
#include <linux/fuse.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/message.h"

enum {
	/* linux/miscdevice.h: MISC_MAJOR and FUSE_MINOR */
	DEVICE_MAJOR = 10,
	DEVICE_MINOR = 229,
	READAHEAD_BYTES = 128 << 10, /* without effect, because the file is not cached */
};

/* NB: DONT_SYNC, because nobody could answer for the file. */
int fuse_take_kept_fd(int fd, enum fuse_kept what)
{
	struct statx status;

	if (statx(fd, "", AT_EMPTY_PATH | AT_STATX_DONT_SYNC, STATX_TYPE, &status))
		return -errno;
	if (what == FUSE_KEPT_FILE && !S_ISREG(status.stx_mode))
		return -EINVAL;
	if (what == FUSE_KEPT_DEVICE &&
	    (!S_ISCHR(status.stx_mode) || status.stx_rdev_major != DEVICE_MAJOR ||
	     status.stx_rdev_minor != DEVICE_MINOR))
		return -EINVAL;
	return fcntl(fd, F_SETFD, FD_CLOEXEC) ? -errno : 0;
}

void fuse_introduce(struct fuse_session *session)
{
	struct {
		struct fuse_in_header header;
		struct fuse_init_in init;
	} request = {
		.header = { .len = sizeof(request), .opcode = FUSE_INIT, .unique = 2 },
		/* Without MAX_PAGES, libfuse assumes that requests have at most 128 KiB. */
		.init = { .major = FUSE_KERNEL_VERSION,
			  .minor = FUSE_KERNEL_MINOR_VERSION,
			  .max_readahead = READAHEAD_BYTES,
			  .flags = FUSE_ASYNC_READ | FUSE_BIG_WRITES | FUSE_MAX_PAGES },
	};
	const struct fuse_buf buffer = { .size = sizeof(request), .mem = &request };

	fuse_session_process_buf(session, &buffer);
}

int fuse_forget_size(int device_fd, uint64_t inode)
{
	struct {
		struct fuse_out_header header;
		struct fuse_notify_inval_inode_out what;
	} notification = {
		.header = { .len = sizeof(notification), .error = FUSE_NOTIFY_INVAL_INODE },
		.what = { .ino = inode, .off = -1 }, /* attributes only */
	};
	ssize_t written = write(device_fd, &notification, sizeof(notification));

	if (written == (ssize_t)sizeof(notification))
		return 0;
	msg_error("cannot tell the kernel of the file's new size: %s",
		  written < 0 ? strerror(errno) : "cut off");
	return written < 0 ? -errno : -EIO;
}
