/* SPDX-License-Identifier: MIT */
/* The ublk front end: the life of /dev/ublkbN. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#include "base/cleanup.h"
#include "base/message.h"
#include "base/size.h"
#include "server/frontend/frontend.h"
#include "server/frontend/ublk_control.h"
#include "server/frontend/ublk_queue.h"

enum {
	SECTOR_SHIFT = 9,
	BLOCK_SHIFT = 12,
	MAX_DEPTH = 1024,    /* more than that goes wrong on older kernels */
	OPEN_WAIT_MS = 5000, /* for /dev/ublkcN */
};

_Static_assert(1u << BLOCK_SHIFT == BLOCK_BYTES, "the device's block is btrfs' sector");

struct ublk {
	struct ublk_control control;
	struct ublksrv_ctrl_dev_info info;
	struct ublk_queue *queues;
	unsigned serving; /* queues that were started and not yet joined */
	bool added;
	int dev_dir; /* /dev, opened while it could be seen */
	int device_fd;
	int ended_fd;
};

static int ublk_open(struct frontend *frontend)
{
	struct ublk *ublk = calloc(1, sizeof(*ublk));
	int err;

	if (!ublk)
		return -ENOMEM;
	ublk->control.fd = -1;
	ublk->device_fd = -1;
	ublk->dev_dir = -1;
	frontend->private = ublk;
	ublk->ended_fd = eventfd(0, EFD_CLOEXEC);
	if (ublk->ended_fd < 0)
		return -errno;
	if (frontend->depth > MAX_DEPTH) {
		msg_error("queue depth %u is over the limit of %d", frontend->depth, MAX_DEPTH);
		return -EINVAL;
	}
	err = ublk_control_open(&ublk->control);
	if (err)
		return err;
	ublk->dev_dir = open("/dev", O_PATH | O_DIRECTORY | O_CLOEXEC);
	return ublk->dev_dir < 0 ? -errno : 0;
}

/* Returns the flags to ask for, of those that the kernel says it has. */
static uint64_t choose_flags(const struct ublk_control *control)
{
	uint64_t wanted = UBLK_F_CMD_IOCTL_ENCODE;

	return wanted & control->features;
}

static int add_device(struct frontend *frontend)
{
	struct ublk *ublk = frontend->private;
	uint64_t flags = choose_flags(&ublk->control);
	int err;

	ublk->info = (struct ublksrv_ctrl_dev_info){
		.dev_id = (uint32_t)frontend->wanted_id,
		.nr_hw_queues = (uint16_t)frontend->queues,
		.queue_depth = (uint16_t)frontend->depth,
		.max_io_buf_bytes = frontend->max_io_bytes,
		.ublksrv_pid = getpid(),
		.flags = flags,
		.ublksrv_flags = frontend->tag,
	};
	err = ublk_add_device(&ublk->control, &ublk->info);
	if (err) {
		msg_error("the kernel refused a ublk device (ADD_DEV): %s", strerror(-err));
		if (err == -EEXIST)
			msg_hint("device id %d is taken; see /sys/class/ublk-char",
				 frontend->wanted_id);
		return err;
	}
	ublk->added = true;
	/* The kernel clears what it does not know instead of refusing it. */
	if ((ublk->info.flags & flags) != flags) {
		msg_error("the kernel dropped ublk flags 0x%llx that it said it has",
			  (unsigned long long)(flags & ~ublk->info.flags));
		return -EPROTO;
	}
	return 0;
}

static int set_params(struct frontend *frontend)
{
	struct ublk *ublk = frontend->private;
	const struct engine *engine = frontend->engine;
	struct ublk_params params = {
		.types = UBLK_PARAM_TYPE_BASIC,
		.basic = {
			.attrs = engine->read_only ? UBLK_ATTR_READ_ONLY :
						     UBLK_ATTR_VOLATILE_CACHE | UBLK_ATTR_FUA,
			.logical_bs_shift = BLOCK_SHIFT,
			.physical_bs_shift = BLOCK_SHIFT,
			.io_opt_shift = BLOCK_SHIFT,
			.io_min_shift = BLOCK_SHIFT,
			.max_sectors = ublk->info.max_io_buf_bytes >> SECTOR_SHIFT,
			.dev_sectors = engine->size >> SECTOR_SHIFT,
		},
	};
	int err;

	if (!engine->read_only) {
		params.types |= UBLK_PARAM_TYPE_DISCARD;
		params.discard = (struct ublk_param_discard){
			.discard_granularity = BLOCK_BYTES,
			.max_discard_sectors = GIB(1) >> SECTOR_SHIFT,
			.max_write_zeroes_sectors = GIB(1) >> SECTOR_SHIFT,
			.max_discard_segments = 1,
		};
	}
	err = ublk_set_params(&ublk->control, ublk->info.dev_id, &params);
	if (err)
		msg_error("the kernel refused the device's parameters (SET_PARAMS): %s",
			  strerror(-err));
	return err;
}

/* The node is there when ADD_DEV returns, but udev may hold or chown it for a moment. */
static int open_device(struct ublk *ublk)
{
	char name[32];

	snprintf(name, sizeof(name), "ublkc%u", ublk->info.dev_id);
	for (int waited_ms = 0;; waited_ms++) {
		ublk->device_fd = openat(ublk->dev_dir, name, O_RDWR | O_CLOEXEC);
		if (ublk->device_fd >= 0)
			return 0;
		if ((errno != EBUSY && errno != ENOENT && errno != EACCES) ||
		    waited_ms == OPEN_WAIT_MS) {
			int err = -errno;

			msg_error("cannot open /dev/%s: %s", name, strerror(-err));
			return err;
		}
		nanosleep(&(struct timespec){ .tv_nsec = 1000000 }, NULL);
	}
}

static int start_queues(struct frontend *frontend)
{
	struct ublk *ublk = frontend->private;

	/* NB: the kernel gives no more queues than there are CPUs (ADD_DEV). */
	ublk->queues = calloc(ublk->info.nr_hw_queues, sizeof(*ublk->queues));
	if (!ublk->queues)
		return -ENOMEM;
	for (unsigned i = 0; i < ublk->info.nr_hw_queues; i++) {
		struct ublk_queue *queue = &ublk->queues[i];
		int err;

		*queue = (struct ublk_queue){
			.index = (uint16_t)i,
			.depth = ublk->info.queue_depth,
			.buffer_bytes = ublk->info.max_io_buf_bytes,
			.encoded = ublk->control.encoded,
			.device_fd = ublk->device_fd,
			.thread = { .ended_fd = ublk->ended_fd },
			.worker = &frontend->engine->workers[i],
		};
		err = ublk_get_affinity(&ublk->control, ublk->info.dev_id, (uint16_t)i,
					&queue->thread.cpus);
		if (err)
			CPU_ZERO(&queue->thread.cpus);
		err = ublk_queue_start(queue);
		if (err) {
			msg_error("cannot start queue %u: %s", i, strerror(-err));
			return err;
		}
		ublk->serving++;
	}
	return 0;
}

static int ublk_stop(struct frontend *frontend)
{
	struct ublk *ublk = frontend->private;
	int err;

	if (!ublk->added)
		return 0;
	/* Requests in flight are still answered; then the driver aborts every tag. */
	err = ublk_stop_device(&ublk->control, ublk->info.dev_id);
	/* -ENODEV: somebody else deleted it, so the queues have ended. */
	if (err && err != -ENODEV) {
		/* Without it the queues do not end: the device stays for `gc`. */
		msg_error("cannot stop ublk device %u (STOP_DEV): %s", ublk->info.dev_id,
			  strerror(-err));
		return err;
	}
	while (ublk->serving)
		ublk_queue_join(&ublk->queues[--ublk->serving]);
	if (ublk->device_fd >= 0)
		close(ublk->device_fd);
	ublk->device_fd = -1;
	err = ublk_delete_device(&ublk->control, ublk->info.dev_id);
	if (err == -ENODEV)
		err = 0;
	if (err)
		msg_error("cannot delete ublk device %u (DEL_DEV): %s", ublk->info.dev_id,
			  strerror(-err));
	else
		ublk->added = false;
	return err;
}

static int ublk_start(struct frontend *frontend)
{
	struct ublk *ublk = frontend->private;
	int err = add_device(frontend);

	if (!err)
		err = set_params(frontend);
	if (!err)
		err = open_device(ublk);
	if (!err)
		err = start_queues(frontend);
	if (!err) {
		/* Reads the partition table, which the queues answer. */
		err = ublk_start_device(&ublk->control, ublk->info.dev_id);
		if (err)
			msg_error("the kernel did not start the device (START_DEV): %s",
				  strerror(-err));
	}
	if (err)
		ublk_stop(frontend);
	return err;
}

static int ublk_describe(const struct frontend *frontend, json_t *ready)
{
	const struct ublk *ublk = frontend->private;
	char path[32], device[32];

	snprintf(path, sizeof(path), "/dev/ublkb%u", ublk->info.dev_id);
	snprintf(device, sizeof(device), "/dev/ublkc%u", ublk->info.dev_id);
	if (json_object_set_new(ready, "device", json_string(path)) ||
	    json_object_set_new(ready, "char_device", json_string(device)) ||
	    json_object_set_new(ready, "id", json_integer(ublk->info.dev_id)) ||
	    json_object_set_new(ready, "queues", json_integer(ublk->info.nr_hw_queues)) ||
	    json_object_set_new(ready, "depth", json_integer(ublk->info.queue_depth)) ||
	    json_object_set_new(ready, "max_io_bytes", json_integer(ublk->info.max_io_buf_bytes)))
		return -ENOMEM;
	return 0;
}

/* NB: claims it for a moment, so it must not be asked often. */
static bool ublk_in_use(const struct frontend *frontend)
{
	const struct ublk *ublk = frontend->private;
	_cleanup_close_ int fd = -1;
	char name[32];

	snprintf(name, sizeof(name), "ublkb%u", ublk->info.dev_id);
	fd = openat(ublk->dev_dir, name, O_RDONLY | O_EXCL | O_CLOEXEC | O_NONBLOCK);
	return fd < 0 && errno == EBUSY;
}

static int ublk_ended_fd(const struct frontend *frontend)
{
	const struct ublk *ublk = frontend->private;

	return ublk->ended_fd;
}

static void ublk_close(struct frontend *frontend)
{
	struct ublk *ublk = frontend->private;

	if (!ublk)
		return;
	if (ublk->serving || ublk->control.stuck) {
		/* Threads, or the kernel, still use this memory: only the exit may take it. */
		fflush(NULL);
		_exit(EXIT_FAILED);
	}
	ublk_control_close(&ublk->control);
	if (ublk->device_fd >= 0)
		close(ublk->device_fd);
	if (ublk->dev_dir >= 0)
		close(ublk->dev_dir);
	if (ublk->ended_fd >= 0)
		close(ublk->ended_fd);
	free(ublk->queues);
	free(ublk);
	frontend->private = NULL;
}

const struct frontend_ops ublk_frontend = {
	.name = "ublk",
	.kernel_device = "/dev/ublk-control",
	.default_depth = 64,
	.default_max_io_bytes = 256 << 10,
	.open = ublk_open,
	.start = ublk_start,
	.describe = ublk_describe,
	.ended_fd = ublk_ended_fd,
	.in_use = ublk_in_use,
	.stop = ublk_stop,
	.close = ublk_close,
};
