/* SPDX-License-Identifier: MIT */
/*
 * /dev/ublk-control: one wrapper per control command. Each waits at most UBLK_CONTROL_WAIT_S (some
 * kernels hang in ADD_DEV or START_DEV) and returns 0 or a negative errno, without a message.
 */
#ifndef FRONTEND_UBLK_CONTROL_H
#define FRONTEND_UBLK_CONTROL_H

#include <liburing.h>
#include <sched.h>
#include <stdbool.h>
#include <stdint.h>

#include "server/frontend/ublk_uapi.h"

enum { UBLK_CONTROL_WAIT_S = 30, UBLK_PATH_BYTES = 32 };

struct ublk_control {
	int fd;
	struct io_uring ring;
	uint64_t features; /* UBLK_F_*; 0 where the kernel cannot tell (before 6.5) */
	bool encoded;	   /* opcodes in ioctl form */
	uint64_t sent;	   /* number of commands, to tell a late completion from ours */
	bool stuck;	   /* a command did not end in time; the kernel may yet write to `buffer` */
	/*
	 * Of the character device; "": commands carry none. The kernel wants it, before the buffer,
	 * of whoever asks for an unprivileged device.
	 */
	_Alignas(8) char path[UBLK_PATH_BYTES];
	union {
		struct ublksrv_ctrl_dev_info info;
		struct ublk_params params;
		cpu_set_t cpus;
		uint64_t features;
	} buffer; /* what commands point to */
};

/* Opens the device and asks for features. Gives a message on failure. */
int ublk_control_open(struct ublk_control *control);
void ublk_control_close(struct ublk_control *control);

/* Commands are for unprivileged device `id` from now on. */
void ublk_control_set_path(struct ublk_control *control, uint32_t id);
/* For others again. */
void ublk_control_clear_path(struct ublk_control *control);

int ublk_add_device(struct ublk_control *control, struct ublksrv_ctrl_dev_info *info);
int ublk_get_device(struct ublk_control *control, uint32_t id, struct ublksrv_ctrl_dev_info *info);
int ublk_get_params(struct ublk_control *control, uint32_t id, struct ublk_params *params);
int ublk_set_params(struct ublk_control *control, uint32_t id, const struct ublk_params *params);
int ublk_get_affinity(struct ublk_control *control, uint32_t id, uint16_t queue, cpu_set_t *cpus);
int ublk_start_device(struct ublk_control *control, uint32_t id);
int ublk_stop_device(struct ublk_control *control, uint32_t id);
/* UBLK_F_SAFE_STOP_DEV. -EBUSY: somebody has the block device open; nothing was done then. */
int ublk_try_stop_device(struct ublk_control *control, uint32_t id);
/*
 * -EBUSY: the driver has not yet seen the end of the last server, or a new one is at it. -EINVAL:
 * the device has no recovery mode; before 6.15 also when no server has fetched from it since the
 * last time.
 */
int ublk_start_recovery(struct ublk_control *control, uint32_t id);
/* Waits until every tag of every queue is on offer. The server is this process. */
int ublk_end_recovery(struct ublk_control *control, uint32_t id);
/*
 * No request comes any more, tags that wait for one are aborted, and those in flight may still be
 * answered. -EBUSY: within `wait_ms`, no tag of some queue became free to be aborted.
 */
int ublk_quiesce_device(struct ublk_control *control, uint32_t id, unsigned wait_ms);
/* UBLK_F_UPDATE_SIZE. At once, whatever the device's state and whoever uses it. */
int ublk_update_size(struct ublk_control *control, uint32_t id, uint64_t bytes);
/* Where the kernel can (6.9), does not wait until the last user has closed the block device. */
int ublk_delete_device(struct ublk_control *control, uint32_t id);

/* "live", "quiesced", ...: UBLK_S_DEV_*. */
const char *ublk_state_name(unsigned state);

#endif
