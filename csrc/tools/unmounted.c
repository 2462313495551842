/* SPDX-License-Identifier: MIT */
#include "tools/unmounted.h"

#include <errno.h>
#include <fcntl.h>
#include <glob.h>
#include <limits.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "base/cleanup.h"
#include "base/message.h"

/*
 * Returns whether a mounted btrfs has this block device. The kernel lists the devices of all
 * mounted btrfs, seeds included, in whatever mount namespace. NB: opening the device with O_EXCL
 * instead could make a concurrent mount fail.
 */
static bool is_mounted(const char *device, char mounted[static PATH_MAX])
{
	char pattern[PATH_MAX];
	bool found;
	glob_t list;

	snprintf(pattern, sizeof(pattern), "/sys/fs/btrfs/*/devices/%s", device);
	found = glob(pattern, GLOB_NOSORT, NULL, &list) == 0;
	if (found)
		snprintf(mounted, PATH_MAX, "%s", list.gl_pathv[0]);
	globfree(&list);
	return found;
}

/* Returns whether "/sys/block/loop3/loop/backing_file" names this file. Sets the device's name. */
static bool backs(const char *entry, const struct stat *file, char device[static 32])
{
	_cleanup_fclose_ FILE *list = fopen(entry, "re");
	char path[PATH_MAX];
	struct stat st;

	if (!list || !fgets(path, sizeof(path), list))
		return false;
	path[strcspn(path, "\n")] = 0;
	return stat(path, &st) == 0 && st.st_dev == file->st_dev && st.st_ino == file->st_ino &&
	       sscanf(entry, "/sys/block/%31[^/]", device) == 1;
}

static int check_loops(const char *path, const struct stat *file)
{
	char device[32], mounted[PATH_MAX];
	glob_t list;
	int ret = 0;

	if (glob("/sys/block/loop*/loop/backing_file", GLOB_NOSORT, NULL, &list))
		return 0;
	for (size_t i = 0; i < list.gl_pathc && !ret; i++) {
		if (!backs(list.gl_pathv[i], file, device) || !is_mounted(device, mounted))
			continue;
		msg_error("%s is mounted: /dev/%s is over it, and in use (%s)", path, device,
			  mounted);
		msg_hint("unmount it first");
		ret = -EBUSY;
	}
	globfree(&list);
	return ret;
}

int open_unmounted(const char *path)
{
	_cleanup_close_ int fd = -1;
	struct stat st = { 0 };
	int ret;

	/* Opening a FIFO would wait for a writer, and opening a tape would rewind it. */
	if (stat(path, &st) == 0 && !S_ISREG(st.st_mode) && !S_ISBLK(st.st_mode)) {
		msg_error("%s is neither a regular file nor a block device", path);
		return -EINVAL;
	}
	fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | (S_ISBLK(st.st_mode) ? O_EXCL : 0));
	if (fd < 0 || fstat(fd, &st)) {
		ret = -errno;
		msg_error("%s: %s", path, strerror(-ret));
		if (ret == -EBUSY)
			msg_hint("it is mounted, or in use otherwise: unmount it first");
		return ret;
	}
	ret = S_ISREG(st.st_mode) ? check_loops(path, &st) : 0;
	return ret ? ret : take_fd(&fd);
}
