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
	json_t *line;
	int err = ublk_get_device(control, id, &info);

	if (err == -ENODEV || err == -EINVAL)
		return 0; /* gone since the directory was read */
	if (err) {
		msg_warning("ublk device %u does not answer (GET_DEV_INFO): %s", id,
			    strerror(-err));
		printf("{\"id\":%u,\"state\":\"unknown\"}\n", id);
		return 0;
	}
	snprintf(tag, sizeof(tag), "%016llx", (unsigned long long)info.ublksrv_flags);
	line = json_pack("{s:i, s:s, s:i, s:s, s:I, s:s, s:i, s:i}", "id", (int)id, "state",
			 ublk_state_name(info.state), "server_pid", (int)info.ublksrv_pid, "tag",
			 tag, "flags", (json_int_t)info.flags, "recovery",
			 ublk_recovery_name(info.flags), "queues", (int)info.nr_hw_queues, "depth",
			 (int)info.queue_depth);
	if (!line)
		return -ENOMEM;
	err = json_dumpf(line, stdout, JSON_COMPACT) ? -EIO : 0;
	json_decref(line);
	putchar('\n');
	return err;
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

/*
 * O_EXCL on a block device fails while it is mounted or otherwise claimed, and keeps others from
 * claiming it while `fd` is open. A device that was never started has no block device.
 */
static int claim(unsigned id, int *fd)
{
	char path[32];

	snprintf(path, sizeof(path), "/dev/ublkb%u", id);
	*fd = open(path, O_RDONLY | O_EXCL | O_CLOEXEC | O_NONBLOCK);
	if (*fd < 0 && errno == EBUSY) {
		msg_error("%s is mounted or in use; it was left alone", path);
		msg_hint("see 'findmnt %s' and /sys/block/ublkb%u/holders", path, id);
		return -EBUSY;
	}
	return 0;
}

static int remove_device(struct ublk_control *control, unsigned id, uint64_t tag)
{
	_cleanup_close_ int claimed = -1;
	struct ublksrv_ctrl_dev_info info;
	int err = ublk_get_device(control, id, &info);

	if (err) {
		msg_error("no ublk device %u: %s", id, strerror(-err));
		return err;
	}
	if (info.ublksrv_flags != tag) {
		msg_error("ublk device %u carries tag %016llx, not %016llx; it was left alone", id,
			  (unsigned long long)info.ublksrv_flags, (unsigned long long)tag);
		return -EPERM;
	}
	err = claim(id, &claimed);
	if (err)
		return err;
	err = ublk_stop_device(control, id);
	cleanup_close(&claimed);
	claimed = -1;
	if (!err)
		err = ublk_delete_device(control, id);
	if (err)
		msg_error("cannot remove ublk device %u: %s", id, strerror(-err));
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
