/* SPDX-License-Identifier: MIT */
#include "server/frontend/fuse_mount.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/cleanup.h"
#include "base/message.h"

static int set_number(int context, const char *key, const char *format, unsigned value)
{
	char text[16];

	snprintf(text, sizeof(text), format, value);
	return fsconfig(context, FSCONFIG_SET_STRING, key, text, 0) ? -errno : 0;
}

static int configure(int context, int fuse_fd, uint32_t max_read_bytes)
{
	int err;

	if (fsconfig(context, FSCONFIG_SET_STRING, "source", "btrfs-ublk", 0))
		return -errno;
	err = set_number(context, "fd", "%u", (unsigned)fuse_fd);
	if (!err)
		err = set_number(context, "rootmode", "%o", S_IFDIR);
	/* Without allow_other, other users cannot enter, whatever the modes say. */
	if (!err)
		err = set_number(context, "user_id", "%u", geteuid());
	if (!err)
		err = set_number(context, "group_id", "%u", getegid());
	if (!err)
		err = set_number(context, "max_read", "%u", max_read_bytes);
	if (err)
		return err;
	if (fsconfig(context, FSCONFIG_SET_FLAG, "default_permissions", NULL, 0))
		return -errno;
	return fsconfig(context, FSCONFIG_CMD_CREATE, NULL, NULL, 0) ? -errno : 0;
}

int fuse_mount_detached(int fuse_fd, uint32_t max_read_bytes)
{
	/*
	 * fsopen(2) and fsmount(2) exist since Linux 5.2; fuse supports them since 5.4
	 * (c30da2e981a7).
	 */
	_cleanup_close_ int context = fsopen("fuse", FSOPEN_CLOEXEC);
	int err = context < 0 ? -errno : configure(context, fuse_fd, max_read_bytes);
	int mount;

	if (!err) {
		mount = fsmount(context, FSMOUNT_CLOEXEC,
				MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV | MOUNT_ATTR_NOEXEC |
					MOUNT_ATTR_NOATIME);
		if (mount >= 0)
			return mount;
		err = -errno;
	}
	msg_error("cannot mount FUSE: %s", strerror(-err));
	if (err == -EPERM)
		msg_hint("this needs root (CAP_SYS_ADMIN)");
	return err;
}
