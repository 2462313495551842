/* SPDX-License-Identifier: MIT */
#include "tools/unmounted.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/cleanup.h"
#include "base/message.h"
#include "tools/loops.h"

struct image {
	const char *path;
	const struct stat *file;
};

/* Returns whether the loop device has this file, or a negative errno after a message. */
static int backs(unsigned number, const struct stat *file)
{
	char entry[64], path[PATH_MAX];
	ssize_t length;
	struct stat st;

	snprintf(entry, sizeof(entry), "/sys/block/loop%u/loop/backing_file", number);
	_cleanup_close_ int fd = open(entry, O_RDONLY | O_CLOEXEC);

	length = fd < 0 ? -1 : read(fd, path, sizeof(path) - 1);
	/* It may have been detached meanwhile. */
	if (length < 0 && (errno == ENOENT || errno == ENXIO || errno == ENODEV))
		return 0;
	if (length < 0) {
		int err = -errno;

		return msg_fail(err, "cannot read %s: %s", entry, strerror(-err));
	}
	path[length] = 0;
	path[strcspn(path, "\n")] = 0;
	return stat(path, &st) == 0 && st.st_dev == file->st_dev && st.st_ino == file->st_ino;
}

/*
 * The kernel lists the devices of all mounted btrfs, seeds included, in whatever mount namespace.
 * NB: opening the device with O_EXCL instead could make a concurrent mount fail.
 */
static int check_loop(void *context, unsigned number)
{
	const struct image *image = context;
	char device[32], mounted[PATH_MAX];
	int ret;

	ret = backs(number, image->file);
	if (ret <= 0)
		return ret;
	snprintf(device, sizeof(device), "loop%u", number);
	ret = btrfs_has_device(device, mounted);
	if (ret <= 0)
		return ret;
	msg_error("%s is mounted: /dev/%s is over it, and in use (%s)", image->path, device,
		  mounted);
	msg_hint("unmount it first");
	return -EBUSY;
}

int open_unmounted(const char *path)
{
	_cleanup_close_ int fd = -1;
	struct stat st = { 0 };
	int ret;

	/* Opening a FIFO would wait for a writer, and opening a tape would rewind it. */
	if (stat(path, &st) == 0 && !S_ISREG(st.st_mode) && !S_ISBLK(st.st_mode))
		return msg_fail(-EINVAL, "%s is neither a regular file nor a block device", path);
	fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | (S_ISBLK(st.st_mode) ? O_EXCL : 0));
	if (fd < 0 || fstat(fd, &st)) {
		ret = -errno;
		msg_error("%s: %s", path, strerror(-ret));
		if (ret == -EBUSY)
			msg_hint("it is mounted, or in use otherwise: unmount it first");
		return ret;
	}
	ret = S_ISREG(st.st_mode) ? loops_each(check_loop, &(struct image){ path, &st }) : 0;
	return ret ?: take_fd(&fd);
}
