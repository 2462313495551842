/* SPDX-License-Identifier: MIT */
#include "server/frontend/ublk_control.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/message.h"

static const char control_path[] = "/dev/ublk-control";

/* In the ring's 128-byte SQEs, the command starts at the addr3 field of short SQEs. */
static struct ublksrv_ctrl_cmd *sqe_command(struct io_uring_sqe *sqe)
{
	return (struct ublksrv_ctrl_cmd *)sqe->cmd;
}

static int wait_for(struct ublk_control *control, uint64_t number)
{
	struct __kernel_timespec deadline = { .tv_sec = UBLK_CONTROL_WAIT_S };
	struct io_uring_cqe *cqe;

	for (;;) {
		int err = io_uring_wait_cqe_timeout(&control->ring, &cqe, &deadline);
		bool ours;

		if (err == -EINTR)
			continue;
		if (err == -ETIME) {
			control->stuck = true;
			return -ETIMEDOUT;
		}
		if (err)
			return err;
		ours = cqe->user_data == number;
		err = cqe->res;
		io_uring_cqe_seen(&control->ring, cqe);
		/* All others complete commands that were given up. */
		if (ours)
			return err;
	}
}

static int send_command(struct ublk_control *control, uint32_t encoded,
			const struct ublksrv_ctrl_cmd *command)
{
	struct io_uring_sqe *sqe = io_uring_get_sqe(&control->ring);
	struct ublksrv_ctrl_cmd carrying = *command;
	int err;

	if (!sqe || control->stuck)
		return -EBUSY;
	if (control->path[0]) {
		carrying.addr = (uintptr_t)control->path;
		carrying.len = (uint16_t)(carrying.len + sizeof(control->path));
		ublk_set_path_bytes(&carrying, sizeof(control->path));
	}
	memset(sqe, 0, 2 * sizeof(*sqe));
	sqe->opcode = IORING_OP_URING_CMD;
	sqe->fd = control->fd;
	sqe->cmd_op = control->encoded ? encoded : _IOC_NR(encoded);
	*sqe_command(sqe) = carrying;
	io_uring_sqe_set_data64(sqe, ++control->sent);
	err = io_uring_submit(&control->ring);
	if (err < 0)
		return err;
	return wait_for(control, control->sent);
}

_Static_assert(offsetof(struct ublk_control, path) + UBLK_PATH_BYTES ==
		       offsetof(struct ublk_control, buffer),
	       "a path ends where the buffer begins");

void ublk_control_set_path(struct ublk_control *control, uint32_t id)
{
	memset(control->path, 0, sizeof(control->path));
	snprintf(control->path, sizeof(control->path), "/dev/ublkc%u", id);
}

void ublk_control_clear_path(struct ublk_control *control)
{
	control->path[0] = 0;
}

/* What drivers return for unknown commands; -524 is the kernel's own ENOTSUPP. */
static bool is_unknown_command(int err)
{
	return err == -EOPNOTSUPP || err == -EINVAL || err == -524;
}

int ublk_control_open(struct ublk_control *control)
{
	struct io_uring_params params = { .flags = IORING_SETUP_SQE128 };
	struct ublksrv_ctrl_cmd command = {
		.dev_id = UINT32_MAX,
		.queue_id = UINT16_MAX,
		.addr = (uintptr_t)&control->buffer.features,
		.len = sizeof(control->buffer.features),
	};
	int err;

	*control = (struct ublk_control){ .encoded = true };
	control->fd = open(control_path, O_RDWR | O_CLOEXEC);
	if (control->fd < 0) {
		err = -errno;
		if (err == -ENOENT || err == -ENODEV || err == -ENXIO) {
			msg_error("this kernel has no ublk driver (%s is missing)", control_path);
			msg_hint("'modprobe ublk_drv' loads it where the kernel has it (Linux 6.0, "
				 "CONFIG_BLK_DEV_UBLK); scripts/vm runs a command on one that has");
		} else {
			msg_error("cannot open %s: %s", control_path, strerror(-err));
			if (err == -EACCES || err == -EPERM)
				msg_hint(
					"making block devices needs root, or the permission of who "
					"administers this machine: docs/features.md");
		}
		return err;
	}
	err = io_uring_queue_init_params(4, &control->ring, &params);
	if (err) {
		msg_error("cannot set up io_uring: %s", strerror(-err));
		if (err == -EPERM)
			msg_hint("see the sysctl kernel.io_uring_disabled");
		close(control->fd);
		control->fd = -1;
		return err;
	}
	err = send_command(control, UBLK_U_CMD_GET_FEATURES, &command);
	if (!err) {
		control->features = control->buffer.features;
		return 0;
	}
	if (!is_unknown_command(err) && err != -ENODEV) {
		msg_error("the ublk driver does not answer (GET_FEATURES): %s", strerror(-err));
		ublk_control_close(control);
		return err;
	}
	/*
	 * Kernels before 6.5 do not tell. Opcodes in ioctl form came with 6.4, and plain ones still
	 * worked.
	 */
	msg_debug("the kernel does not tell its ublk features: %s", strerror(-err));
	control->encoded = false;
	return 0;
}

void ublk_control_close(struct ublk_control *control)
{
	if (control->fd < 0)
		return;
	io_uring_queue_exit(&control->ring);
	close(control->fd);
	control->fd = -1;
}

int ublk_add_device(struct ublk_control *control, struct ublksrv_ctrl_dev_info *info)
{
	struct ublksrv_ctrl_cmd command = {
		.dev_id = info->dev_id,
		.queue_id = UINT16_MAX,
		.addr = (uintptr_t)&control->buffer.info,
		.len = sizeof(control->buffer.info),
	};
	int err;

	control->buffer.info = *info;
	err = send_command(control, UBLK_ENCODE_CTRL_WRITE(UBLK_CMD_ADD_DEV), &command);
	if (!err)
		*info = control->buffer.info;
	return err;
}

int ublk_get_device(struct ublk_control *control, uint32_t id, struct ublksrv_ctrl_dev_info *info)
{
	struct ublksrv_ctrl_cmd command = {
		.dev_id = id,
		.queue_id = UINT16_MAX,
		.addr = (uintptr_t)&control->buffer.info,
		.len = sizeof(control->buffer.info),
	};
	int err;

	control->buffer.info = (struct ublksrv_ctrl_dev_info){};
	err = send_command(control,
			   control->path[0] ? UBLK_ENCODE_CTRL_READ(UBLK_CMD_GET_DEV_INFO2) :
					      UBLK_ENCODE_CTRL_READ(UBLK_CMD_GET_DEV_INFO),
			   &command);
	if (!err)
		*info = control->buffer.info;
	return err;
}

int ublk_get_params(struct ublk_control *control, uint32_t id, struct ublk_params *params)
{
	struct ublksrv_ctrl_cmd command = {
		.dev_id = id,
		.queue_id = UINT16_MAX,
		.addr = (uintptr_t)&control->buffer.params,
		.len = sizeof(control->buffer.params),
	};
	int err;

	control->buffer.params = (struct ublk_params){ .len = sizeof(control->buffer.params) };
	err = send_command(control, UBLK_ENCODE_CTRL_READ(UBLK_CMD_GET_PARAMS), &command);
	if (!err)
		*params = control->buffer.params;
	return err;
}

int ublk_set_params(struct ublk_control *control, uint32_t id, const struct ublk_params *params)
{
	struct ublksrv_ctrl_cmd command = {
		.dev_id = id,
		.queue_id = UINT16_MAX,
		.addr = (uintptr_t)&control->buffer.params,
		.len = sizeof(control->buffer.params),
	};

	control->buffer.params = *params;
	control->buffer.params.len = sizeof(control->buffer.params);
	return send_command(control, UBLK_ENCODE_CTRL_WRITE(UBLK_CMD_SET_PARAMS), &command);
}

int ublk_get_affinity(struct ublk_control *control, uint32_t id, uint16_t queue, cpu_set_t *cpus)
{
	struct ublksrv_ctrl_cmd command = {
		.dev_id = id,
		.queue_id = UINT16_MAX,
		.addr = (uintptr_t)&control->buffer.cpus,
		.len = sizeof(control->buffer.cpus),
		.data = { queue },
	};
	int err;

	CPU_ZERO(&control->buffer.cpus);
	err = send_command(control, UBLK_ENCODE_CTRL_READ(UBLK_CMD_GET_QUEUE_AFFINITY), &command);
	if (!err)
		*cpus = control->buffer.cpus;
	return err;
}

int ublk_start_device(struct ublk_control *control, uint32_t id)
{
	struct ublksrv_ctrl_cmd command = {
		.dev_id = id,
		.queue_id = UINT16_MAX,
		.data = { (uint64_t)getpid() },
	};

	return send_command(control, UBLK_ENCODE_CTRL_WRITE(UBLK_CMD_START_DEV), &command);
}

int ublk_stop_device(struct ublk_control *control, uint32_t id)
{
	struct ublksrv_ctrl_cmd command = { .dev_id = id, .queue_id = UINT16_MAX };

	return send_command(control, UBLK_ENCODE_CTRL_WRITE(UBLK_CMD_STOP_DEV), &command);
}

int ublk_try_stop_device(struct ublk_control *control, uint32_t id)
{
	struct ublksrv_ctrl_cmd command = { .dev_id = id, .queue_id = UINT16_MAX };

	return send_command(control, UBLK_U_CMD_TRY_STOP_DEV, &command);
}

int ublk_start_recovery(struct ublk_control *control, uint32_t id)
{
	struct ublksrv_ctrl_cmd command = { .dev_id = id, .queue_id = UINT16_MAX };

	return send_command(control, UBLK_ENCODE_CTRL_WRITE(UBLK_CMD_START_USER_RECOVERY),
			    &command);
}

int ublk_end_recovery(struct ublk_control *control, uint32_t id)
{
	struct ublksrv_ctrl_cmd command = {
		.dev_id = id,
		.queue_id = UINT16_MAX,
		.data = { (uint64_t)getpid() },
	};

	return send_command(control, UBLK_ENCODE_CTRL_WRITE(UBLK_CMD_END_USER_RECOVERY), &command);
}

int ublk_quiesce_device(struct ublk_control *control, uint32_t id, unsigned wait_ms)
{
	struct ublksrv_ctrl_cmd command = {
		.dev_id = id,
		.queue_id = UINT16_MAX,
		.data = { wait_ms },
	};

	return send_command(control, UBLK_U_CMD_QUIESCE_DEV, &command);
}

int ublk_update_size(struct ublk_control *control, uint32_t id, uint64_t bytes)
{
	struct ublksrv_ctrl_cmd command = {
		.dev_id = id,
		.queue_id = UINT16_MAX,
		.data = { bytes >> 9 },
	};

	return send_command(control, UBLK_U_CMD_UPDATE_SIZE, &command);
}

const char *ublk_state_name(unsigned state)
{
	static const char *const names[] = {
		[UBLK_S_DEV_DEAD] = "dead",
		[UBLK_S_DEV_LIVE] = "live",
		[UBLK_S_DEV_QUIESCED] = "quiesced",
		[UBLK_S_DEV_FAIL_IO] = "fail-io",
	};

	return state < sizeof(names) / sizeof(*names) ? names[state] : "unknown";
}

int ublk_delete_device(struct ublk_control *control, uint32_t id)
{
	struct ublksrv_ctrl_cmd command = { .dev_id = id, .queue_id = UINT16_MAX };
	int err;

	if (control->encoded) {
		err = send_command(control, UBLK_U_CMD_DEL_DEV_ASYNC, &command);
		if (!is_unknown_command(err))
			return err;
	}
	return send_command(control, UBLK_ENCODE_CTRL_WRITE(UBLK_CMD_DEL_DEV), &command);
}
