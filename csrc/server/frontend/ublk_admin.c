/* SPDX-License-Identifier: MIT */
#include "server/frontend/ublk_admin.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/cleanup.h"
#include "base/json_text.h"
#include "base/message.h"
#include "server/frontend/ublk_control.h"
#include "server/frontend/ublk_recovery.h"

static void cleanup_closedir(DIR **dir)
{
	if (*dir)
		closedir(*dir);
}

static int print_device(struct ublk_control *control, unsigned id)
{
	struct ublksrv_ctrl_dev_info info;
	char tag[17];
	int err = ublk_get_device(control, id, &info);

	if (err == -ENODEV || err == -EINVAL)
		return 0; /* it has gone since the directory was read */
	if (err) {
		msg_warning("ublk device %u does not answer (GET_DEV_INFO): %s", id,
			    strerror(-err));
		printf("{\"id\":%u,\"state\":\"unknown\"}\n", id);
		return 0;
	}
	snprintf(tag, sizeof(tag), "%016llx", (unsigned long long)info.ublksrv_flags);
	return json_text_print(json_pack(
		"{s:i, s:s, s:i, s:s, s:I, s:s, s:i, s:i}", "id", (int)id, "state",
		ublk_state_name(info.state), "server_pid", (int)info.ublksrv_pid, "tag", tag,
		"flags", (json_int_t)info.flags, "recovery", ublk_recovery_name(info.flags),
		"queues", (int)info.nr_hw_queues, "depth", (int)info.queue_depth));
}

int ublk_list_devices(void)
{
	_cleanup_(cleanup_closedir) DIR *dir = NULL;
	struct ublk_control control;
	struct dirent *entry;
	int err = ublk_control_open(&control);

	if (err)
		return err;
	dir = opendir("/sys/class/ublk-char");
	while (dir && !err && (entry = readdir(dir))) {
		unsigned id;

		if (sscanf(entry->d_name, "ublkc%u", &id) == 1)
			err = print_device(&control, id);
	}
	ublk_control_close(&control);
	return err;
}

int ublk_withdraw_device(struct ublk_control *control, int dev_dir, unsigned id, int *claim_fd)
{
	char name[32];

	if (control->features & UBLK_F_SAFE_STOP_DEV && !ublk_try_stop_device(control, id))
		return 0;
	/*
	 * The driver counts all that have the device open as users, even udev. O_EXCL fails only
	 * while it is mounted or otherwise claimed, and keeps others from claiming it. A device
	 * that was never started has no block device.
	 */
	snprintf(name, sizeof(name), "ublkb%u", id);
	*claim_fd = openat(dev_dir, name, O_RDONLY | O_EXCL | O_CLOEXEC | O_NONBLOCK);
	return *claim_fd < 0 && errno == EBUSY ? -EBUSY : 0;
}

static int remove_device(struct ublk_control *control, unsigned id, uint64_t tag)
{
	_cleanup_close_ int claimed = -1, dev_dir = -1;
	struct ublksrv_ctrl_dev_info info;
	int err = ublk_get_device(control, id, &info);

	if (err)
		return msg_fail(err, "no ublk device %u: %s", id, strerror(-err));
	if (info.ublksrv_flags != tag)
		return msg_fail(
			-EPERM,
			"ublk device %u carries tag %016llx, not %016llx; it was left alone", id,
			(unsigned long long)info.ublksrv_flags, (unsigned long long)tag);
	dev_dir = open("/dev", O_PATH | O_DIRECTORY | O_CLOEXEC);
	if (dev_dir < 0)
		return -errno;
	err = ublk_withdraw_device(control, dev_dir, id, &claimed);
	if (err) {
		msg_error("/dev/ublkb%u is mounted or in use; it was left alone", id);
		msg_hint("see 'findmnt /dev/ublkb%u' and /sys/block/ublkb%u/holders", id, id);
		return err;
	}
	err = ublk_stop_device(control, id);
	cleanup_close(&claimed);
	claimed = -1;
	if (!err)
		err = ublk_delete_device(control, id);
	if (err)
		return msg_fail(err, "cannot remove ublk device %u: %s", id, strerror(-err));
	return err;
}

int ublk_remove_device(unsigned id, uint64_t tag)
{
	struct ublk_control control;
	int err = ublk_control_open(&control);

	if (err)
		return err;
	err = remove_device(&control, id, tag);
	ublk_control_close(&control);
	return err;
}
