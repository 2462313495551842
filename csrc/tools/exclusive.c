/* SPDX-License-Identifier: MIT */
#include "tools/exclusive.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/loop.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>

#include "base/cleanup.h"
#include "base/message.h"
#include "tools/loops.h"

/* Packs a device number as the kernel does in struct loop_info64 (huge_encode_dev). */
static uint64_t encode_device(dev_t device)
{
	uint64_t minor_number = minor(device);

	return ((minor_number & ~0xffULL) << 12) | ((uint64_t)major(device) << 8) |
	       (minor_number & 0xff);
}

static bool loop_is_on(const char *path, const struct stat *file)
{
	struct loop_info64 info;
	_cleanup_close_ int fd = open(path, O_RDONLY | O_CLOEXEC);

	/* A loop device that disappears meanwhile does not use the file. */
	return fd >= 0 && !ioctl(fd, LOOP_GET_STATUS64, &info) && info.lo_inode == file->st_ino &&
	       info.lo_device == encode_device(file->st_dev);
}

struct image {
	const char *path;
	const struct stat *file;
};

static int check_loop(void *context, unsigned number)
{
	const struct image *image = context;
	char device[64];

	snprintf(device, sizeof(device), "/dev/loop%u", number);
	if (!loop_is_on(device, image->file))
		return 0;
	msg_error("%s is in use: %s is on it", image->path, device);
	msg_hint("unmount it, then: losetup -d %s", device);
	return -EBUSY;
}

static int explain_open(const char *path, int error)
{
	msg_error("%s: %s", path, strerror(error));
	if (error == EBUSY)
		msg_hint("it is mounted, or another driver holds it");
	return -error;
}

int open_exclusive(const char *path)
{
	_cleanup_close_ int fd = -1;
	struct stat before, after;
	int flags = O_RDWR | O_CLOEXEC;
	int ret;

	/* NB: opening a FIFO blocks and opening a device can do things, so look first. */
	if (stat(path, &before))
		return explain_open(path, errno);
	if (!S_ISREG(before.st_mode) && !S_ISBLK(before.st_mode))
		return msg_fail(-EINVAL, "%s is neither a regular file nor a block device", path);
	if (S_ISBLK(before.st_mode))
		flags |= O_EXCL;
	fd = open(path, flags);
	if (fd < 0)
		return explain_open(path, errno);
	if (fstat(fd, &after))
		return explain_open(path, errno);
	if (after.st_dev != before.st_dev || after.st_ino != before.st_ino)
		return msg_fail(-EBUSY, "%s is another file now than a moment ago", path);
	if (flock(fd, LOCK_EX | LOCK_NB)) {
		if (errno != EWOULDBLOCK)
			return explain_open(path, errno);
		return msg_fail(-EBUSY, "%s is locked by another process", path);
	}
	ret = S_ISREG(after.st_mode) ? loops_each(check_loop, &(struct image){ path, &after }) : 0;
	return ret ?: take_fd(&fd);
}
