/* SPDX-License-Identifier: MIT */
/* The ublk front end: the life of /dev/ublkbN. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/cleanup.h"
#include "base/message.h"
#include "base/size.h"
#include "server/frontend/frontend.h"
#include "server/frontend/ublk_admin.h"
#include "server/frontend/ublk_control.h"
#include "server/frontend/ublk_features.h"
#include "server/frontend/ublk_queue.h"
#include "server/frontend/ublk_recovery.h"

enum {
	SECTOR_SHIFT = 9,
	BLOCK_SHIFT = 12,
	MAX_DEPTH = 1024, /* more than that fails on older kernels */
	QUIESCE_WAIT_MS = 5000,
	DRAIN_WAIT_MS = 10 * 1000, /* for one queue, to answer what is in flight */
};

/* Milliseconds. The block layer checks time-outs once per second. */
#define IO_TIMEOUT_MS "1000"

_Static_assert(1u << BLOCK_SHIFT == BLOCK_BYTES, "the device's block is btrfs' sector");

struct ublk {
	struct ublk_control control;
	struct ublksrv_ctrl_dev_info info;
	uint64_t recovery_flags; /* flags to ask for */
	uint64_t feature_flags;	 /* flags to ask for */
	struct ublk_queue *queues;
	unsigned serving; /* number of queues that were started and not yet joined */
	bool added;
	bool draining; /* atomic: queues shall end when they have answered all requests */
	int dev_dir;   /* /dev, opened while it was visible */
	int block_dir; /* /sys/block, opened while it was visible; -1: it is not available */
	int device_fd;
	int claim_fd; /* from ublk_withdraw() */
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
	ublk->claim_fd = -1;
	ublk->dev_dir = -1;
	ublk->block_dir = -1;
	frontend->private = ublk;
	ublk->ended_fd = eventfd(0, EFD_CLOEXEC);
	if (ublk->ended_fd < 0)
		return -errno;
	if (frontend->depth > MAX_DEPTH)
		return msg_fail(-EINVAL, "queue depth %u is over the limit of %d", frontend->depth,
				MAX_DEPTH);
	if (frontend->recover_fd_count)
		return msg_fail(
			-EINVAL,
			"--recover-fds is about FUSE connections; a ublk device is taken over by "
			"--recover");
	err = ublk_control_open(&ublk->control);
	if (err)
		return err;
	ublk->block_dir = open("/sys/block", O_PATH | O_DIRECTORY | O_CLOEXEC);
	ublk->dev_dir = open("/dev", O_PATH | O_DIRECTORY | O_CLOEXEC);
	if (ublk->dev_dir < 0)
		return -errno;
	if (frontend->recover_id < 0) {
		err = ublk_features_choose(&ublk->control, frontend->features,
					   &ublk->feature_flags);
		return err ? err :
			     ublk_recovery_flags(frontend->recovery, &ublk->control,
						 &ublk->recovery_flags);
	}
	err = ublk_recovery_find(frontend, &ublk->control, &ublk->info);
	if (err)
		return err;
	frontend->queues = ublk->info.nr_hw_queues;
	frontend->depth = ublk->info.queue_depth;
	frontend->max_io_bytes = ublk->info.max_io_buf_bytes;
	return 0;
}

static int add_device(struct frontend *frontend)
{
	struct ublk *ublk = frontend->private;
	uint64_t flags = ublk->feature_flags;
	int err;

	ublk->info = (struct ublksrv_ctrl_dev_info){
		.dev_id = (uint32_t)frontend->wanted_id,
		.nr_hw_queues = (uint16_t)frontend->queues,
		.queue_depth = (uint16_t)frontend->depth,
		.max_io_buf_bytes = frontend->max_io_bytes,
		.ublksrv_pid = getpid(),
		.flags = flags | ublk->recovery_flags,
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
	/* The kernel clears unknown flags instead of refusing them. */
	if ((ublk->info.flags & flags) != flags)
		return msg_fail(-EPROTO, "the kernel dropped ublk flags 0x%llx that it said it has",
				(unsigned long long)(flags & ~ublk->info.flags));
	return ublk_recovery_granted(frontend->recovery, ublk->info.flags);
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
		return msg_fail(err, "the kernel refused the device's parameters (SET_PARAMS): %s",
				strerror(-err));
	return err;
}

static int open_device(struct ublk *ublk)
{
	ublk->device_fd = ublk_open_char_device(ublk->dev_dir, ublk->info.dev_id);
	return ublk->device_fd < 0 ? ublk->device_fd : 0;
}

static int start_queues(struct frontend *frontend)
{
	struct ublk *ublk = frontend->private;

	/* NB: the kernel makes at most as many queues as there are CPUs (ADD_DEV). */
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
			.registered = ublk->info.flags & UBLK_F_AUTO_BUF_REG,
			.device_fd = ublk->device_fd,
			.draining = &ublk->draining,
			.thread = { .ended_fd = ublk->ended_fd },
			.worker = &frontend->engine->workers[i],
		};
		/*
		 * On all CPUs that submit to its queue: on a single one it would have to wait for
		 * the very program that it answers, while the next CPU is idle.
		 */
		if (ublk_get_affinity(&ublk->control, ublk->info.dev_id, (uint16_t)i,
				      &queue->thread.cpus))
			CPU_ZERO(&queue->thread.cpus);
		err = ublk_queue_start(queue);
		if (err)
			return msg_fail(err, "cannot start queue %u: %s", i, strerror(-err));
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
	/* Requests in flight are still answered; then the driver aborts all tags. */
	err = ublk_stop_device(&ublk->control, ublk->info.dev_id);
	/* -ENODEV: another program has deleted it, so the queues have ended. */
	if (err && err != -ENODEV) {
		/* The queues do not end then, so the device stays for `gc`. */
		return msg_fail(err, "cannot stop ublk device %u (STOP_DEV): %s", ublk->info.dev_id,
				strerror(-err));
	}
	while (ublk->serving)
		ublk_queue_join(&ublk->queues[--ublk->serving]);
	cleanup_close(&ublk->device_fd);
	ublk->device_fd = -1;
	cleanup_close(&ublk->claim_fd);
	ublk->claim_fd = -1;
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

/*
 * Shortens the time-out of requests. Drivers before 6.15 may learn of a server's death only when a
 * request times out (ublk_recovery.c), by default after 30 s. A living server gets more time again
 * and again, however slow it is.
 */
static void shorten_timeout(const struct ublk *ublk)
{
	_cleanup_close_ int fd = -1;
	char name[64];

	/* Linux 6.15 and newer have this feature bit; see ublk_recovery_begin(). */
	if (ublk->control.features & UBLK_F_SUPPORT_ZERO_COPY)
		return;
	snprintf(name, sizeof(name), "ublkb%u/queue/io_timeout", ublk->info.dev_id);
	fd = openat(ublk->block_dir, name, O_WRONLY | O_CLOEXEC);
	/* Without it, a recovery may take longer. */
	if (fd >= 0)
		(void)!write(fd, IO_TIMEOUT_MS, strlen(IO_TIMEOUT_MS));
}

static int make_device(struct frontend *frontend)
{
	struct ublk *ublk = frontend->private;
	int err = add_device(frontend);

	if (!err)
		err = open_device(ublk);
	if (!err)
		err = set_params(frontend);
	if (!err)
		err = start_queues(frontend);
	if (!err) {
		/* This reads the partition table, which the queues answer. */
		err = ublk_start_device(&ublk->control, ublk->info.dev_id);
		if (err)
			msg_error("the kernel did not start the device (START_DEV): %s",
				  strerror(-err));
	}
	if (err)
		ublk_stop(frontend);
	else
		shorten_timeout(ublk);
	return err;
}

/* NB: whatever fails, do not stop or delete the device, because it may be in use. */
static int take_over(struct frontend *frontend)
{
	struct ublk *ublk = frontend->private;
	uint32_t id = ublk->info.dev_id;
	int err = ublk_recovery_begin(&ublk->control, ublk->dev_dir, &ublk->info);

	if (!err)
		err = open_device(ublk);
	if (!err)
		err = start_queues(frontend);
	if (!err) {
		err = ublk_end_recovery(&ublk->control, id);
		if (err)
			msg_error("the kernel did not hand over the device (END_USER_RECOVERY): %s",
				  strerror(-err));
	}
	if (!err && frontend->grow)
		err = ublk_recovery_grow(frontend->engine, &ublk->control, id);
	if (!err)
		err = ublk_get_device(&ublk->control, id, &ublk->info);
	if (err) {
		msg_hint("ublk device %u is left %s, for another try", id,
			 ublk_state_name(ublk->info.state));
		return err;
	}
	ublk->added = true;
	return 0;
}

static int ublk_start(struct frontend *frontend)
{
	return frontend->recover_id < 0 ? make_device(frontend) : take_over(frontend);
}

static bool ublk_outlives(const struct frontend *frontend)
{
	struct ublk *ublk = frontend->private;
	struct ublksrv_ctrl_dev_info info;

	return !ublk_get_device(&ublk->control, ublk->info.dev_id, &info) &&
	       info.flags & UBLK_F_USER_RECOVERY && info.state != UBLK_S_DEV_DEAD;
}

static void ublk_hand_over(struct frontend *frontend)
{
	struct ublk *ublk = frontend->private;
	int err;

	/* Else requests in flight are left to --recovery. */
	if (!(ublk->info.flags & UBLK_F_QUIESCE))
		return;
	__atomic_store_n(&ublk->draining, true, __ATOMIC_RELEASE);
	err = ublk_quiesce_device(&ublk->control, ublk->info.dev_id, QUIESCE_WAIT_MS);
	/* NB: there is no way back even after a failure, because no request comes any more. */
	if (err)
		msg_warning("cannot quiesce ublk device %u (QUIESCE_DEV): %s", ublk->info.dev_id,
			    strerror(-err));
	while (!err && ublk->serving &&
	       ublk_queue_join_within(&ublk->queues[ublk->serving - 1], DRAIN_WAIT_MS))
		ublk->serving--;
	if (ublk->serving)
		msg_warning("some requests of ublk device %u are left to --recovery %s",
			    ublk->info.dev_id, ublk_recovery_name(ublk->info.flags));
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
	    json_object_set_new(ready, "recovery",
				json_string(ublk_recovery_name(ublk->info.flags))) ||
	    json_object_set_new(ready, "queues", json_integer(ublk->info.nr_hw_queues)) ||
	    json_object_set_new(ready, "depth", json_integer(ublk->info.queue_depth)) ||
	    json_object_set_new(ready, "max_io_bytes", json_integer(ublk->info.max_io_buf_bytes)))
		return -ENOMEM;
	return 0;
}

static dev_t ublk_number(const struct frontend *frontend)
{
	const struct ublk *ublk = frontend->private;
	struct stat status;
	char name[32];

	if (!ublk->added && frontend->recover_id < 0)
		return 0;
	snprintf(name, sizeof(name), "ublkb%u", ublk->info.dev_id);
	return fstatat(ublk->dev_dir, name, &status, 0) ? 0 : status.st_rdev;
}

static int ublk_withdraw(struct frontend *frontend)
{
	struct ublk *ublk = frontend->private;

	return ublk_withdraw_device(&ublk->control, ublk->dev_dir, ublk->info.dev_id,
				    &ublk->claim_fd);
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
		/* Threads or the kernel still use this memory, so only the exit may take it. */
		fflush(NULL);
		_exit(EXIT_FAILED);
	}
	ublk_control_close(&ublk->control);
	cleanup_close(&ublk->device_fd);
	cleanup_close(&ublk->dev_dir);
	cleanup_close(&ublk->block_dir);
	cleanup_close(&ublk->ended_fd);
	free(ublk->queues);
	free(ublk);
	frontend->private = NULL;
}

const struct frontend_ops ublk_frontend = {
	.name = "ublk",
	.kernel_device = "/dev/ublk-control",
	.default_depth = 64,
	.default_max_io_bytes = 256 << 10,
	.takeover_option = "--recover",
	.features = ublk_features_describe,
	.open = ublk_open,
	.start = ublk_start,
	.describe = ublk_describe,
	.ended_fd = ublk_ended_fd,
	.number = ublk_number,
	.withdraw = ublk_withdraw,
	.stop = ublk_stop,
	.outlives = ublk_outlives,
	.hand_over = ublk_hand_over,
	.close = ublk_close,
};
