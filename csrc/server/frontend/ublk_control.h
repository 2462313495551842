/* SPDX-License-Identifier: MIT */
/*
 * /dev/ublk-control: one wrapper per control command. Each waits at most UBLK_CONTROL_WAIT_S (some
 * kernels hang in ADD_DEV or START_DEV) and returns 0 or a negative errno, without a message.
 */
#pragma once

#include <liburing.h>
#include <sched.h>
#include <stdbool.h>
#include <stdint.h>

#include "server/frontend/ublk_uapi.h"

enum { UBLK_CONTROL_WAIT_S = 30 };

struct ublk_control {
	int fd;
	struct io_uring ring;
	uint64_t features; /* UBLK_F_*; 0 where the kernel cannot tell (before 6.5) */
	bool encoded;	   /* opcodes in ioctl form */
	uint64_t sent;	   /* number of commands, which tells late completions from ours */
	bool stuck; /* a command did not end in time, and the kernel may still write to `buffer` */
	union {
		struct ublksrv_ctrl_dev_info info;
		struct ublk_params params;
		cpu_set_t cpus;
		uint64_t features;
	} buffer; /* what commands point to */
};

/* Opens the device and asks for its features. Gives a message on failure. */
int ublk_control_open(struct ublk_control *control);
void ublk_control_close(struct ublk_control *control);

int ublk_add_device(struct ublk_control *control, struct ublksrv_ctrl_dev_info *info);
int ublk_get_device(struct ublk_control *control, uint32_t id, struct ublksrv_ctrl_dev_info *info);
int ublk_get_params(struct ublk_control *control, uint32_t id, struct ublk_params *params);
int ublk_set_params(struct ublk_control *control, uint32_t id, struct ublk_params *params);
int ublk_get_affinity(struct ublk_control *control, uint32_t id, uint16_t queue, cpu_set_t *cpus);
int ublk_start_device(struct ublk_control *control, uint32_t id);
int ublk_stop_device(struct ublk_control *control, uint32_t id);
/* UBLK_F_SAFE_STOP_DEV. Returns -EBUSY, and does nothing, while the block device is open. */
int ublk_try_stop_device(struct ublk_control *control, uint32_t id);
/*
 * Returns -EBUSY when the driver has not yet noticed the end of the last server, or there is a new
 * one. Returns -EINVAL when the device has no recovery mode; before 6.15 also when no server has
 * fetched from it since the last time.
 */
int ublk_start_recovery(struct ublk_control *control, uint32_t id);
/* Waits until all tags of all queues are on offer. The server is this process. */
int ublk_end_recovery(struct ublk_control *control, uint32_t id);
/*
 * Stops new requests and aborts tags that wait for one; those in flight may still be answered.
 * Returns -EBUSY when no tag of some queue became free to be aborted within `wait_ms`.
 */
int ublk_quiesce_device(struct ublk_control *control, uint32_t id, unsigned wait_ms);
/* UBLK_F_UPDATE_SIZE. Takes effect at once, whatever the device's state and users. */
int ublk_update_size(struct ublk_control *control, uint32_t id, uint64_t bytes);
/* Where the kernel can do that (6.9), does not wait until the block device is closed. */
int ublk_delete_device(struct ublk_control *control, uint32_t id);

/* "live", "quiesced", ...: UBLK_S_DEV_*. */
const char *ublk_state_name(unsigned state);
