/* SPDX-License-Identifier: MIT */
#include "tools/open_image.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/loop.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include "base/cleanup.h"
#include "base/message.h"

struct image {
	const char *path;
	struct stat file;
	/* Refuses a loop device that may have a file: -EBUSY after a message, or another errno. */
	int (*check_loop)(const struct image *image, unsigned number);
};

static int cannot_list(const char *path, int error)
{
	msg_error("cannot list %s: %s", path, strerror(error));
	return -error;
}

/*
 * Calls `each` with the names in a directory, until it returns something else than 0. Where there
 * is no such directory, there is none of its names. NB: not with glob(), which frees memory twice
 * when memory is short (glibc 2.36).
 */
static int each_name(const char *path, int (*each)(void *context, const char *name), void *context)
{
	DIR *directory = opendir(path);
	const struct dirent *entry;
	int ret = 0;

	if (!directory)
		return errno == ENOENT ? 0 : cannot_list(path, errno);
	while (!ret) {
		errno = 0;
		entry = readdir(directory);
		if (!entry)
			break;
		ret = each(context, entry->d_name);
	}
	if (!ret && errno)
		ret = cannot_list(path, errno);
	closedir(directory);
	return ret;
}

static int check_loops(void *context, const char *name)
{
	const struct image *image = context;
	unsigned number;
	char path[64];

	if (sscanf(name, "loop%u", &number) != 1)
		return 0;
	snprintf(path, sizeof(path), "/sys/block/loop%u/loop/backing_file", number);
	return access(path, F_OK) ? 0 : image->check_loop(image, number);
}

struct wanted {
	const char *device;
	char *entry;
};

static int take_btrfs(void *context, const char *name)
{
	const struct wanted *wanted = context;

	if (*name == '.')
		return 0;
	snprintf(wanted->entry, PATH_MAX, "/sys/fs/btrfs/%.255s/devices/%.255s", name,
		 wanted->device);
	return !access(wanted->entry, F_OK);
}

/*
 * Returns 1 when a mounted btrfs has the block device of that name, with its entry in `entry`; 0
 * when none has; or a negative errno after a message.
 */
static int btrfs_has_device(const char *device, char entry[static PATH_MAX])
{
	struct wanted wanted = { device, entry };

	return each_name("/sys/fs/btrfs", take_btrfs, &wanted);
}

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

static int check_unused(const struct image *image, unsigned number)
{
	char device[64];

	snprintf(device, sizeof(device), "/dev/loop%u", number);
	if (!loop_is_on(device, &image->file))
		return 0;
	msg_error("%s is in use: %s is on it", image->path, device);
	msg_hint("unmount it, then: losetup -d %s", device);
	return -EBUSY;
}

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
static int check_unmounted(const struct image *image, unsigned number)
{
	char device[32], mounted[PATH_MAX];
	int ret;

	ret = backs(number, &image->file);
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

static int explain_open(const char *path, int error)
{
	msg_error("%s: %s", path, strerror(error));
	if (error == EBUSY)
		msg_hint("it is mounted, or in use otherwise: unmount it first");
	return -error;
}

static int open_image(struct image *image, int flags)
{
	const char *path = image->path;
	struct stat before, *after = &image->file;
	_cleanup_close_ int fd = -1;
	int ret;

	/* NB: opening a FIFO blocks and opening a device can do things, so look first. */
	if (stat(path, &before))
		return explain_open(path, errno);
	if (!S_ISREG(before.st_mode) && !S_ISBLK(before.st_mode))
		return msg_fail(-EINVAL, "%s is neither a regular file nor a block device", path);
	if (S_ISBLK(before.st_mode))
		flags |= O_EXCL;
	fd = open(path, flags | O_CLOEXEC | O_NONBLOCK);
	if (fd < 0 || fstat(fd, after))
		return explain_open(path, errno);
	if (after->st_dev != before.st_dev || after->st_ino != before.st_ino)
		return msg_fail(-EBUSY, "%s is another file now than a moment ago", path);
	if ((flags & O_ACCMODE) == O_RDWR && flock(fd, LOCK_EX | LOCK_NB)) {
		if (errno != EWOULDBLOCK)
			return explain_open(path, errno);
		return msg_fail(-EBUSY, "%s is locked by another process", path);
	}
	ret = S_ISREG(after->st_mode) ? each_name("/sys/block", check_loops, image) : 0;
	return ret ?: take_fd(&fd);
}

int open_unmounted(const char *path)
{
	return open_image(&(struct image){ .path = path, .check_loop = check_unmounted }, O_RDONLY);
}

int open_exclusive(const char *path)
{
	return open_image(&(struct image){ .path = path, .check_loop = check_unused }, O_RDWR);
}
