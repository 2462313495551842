/* SPDX-License-Identifier: MIT */
#include "server/frontend/ublk_control.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/message.h"

static const char control_path[] = "/dev/ublk-control";

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
			struct ublksrv_ctrl_cmd carrying)
{
	struct io_uring_sqe *sqe = io_uring_get_sqe(&control->ring);
	int err;

	if (!sqe || control->stuck)
		return -EBUSY;
	memset(sqe, 0, 2 * sizeof(*sqe));
	sqe->opcode = IORING_OP_URING_CMD;
	sqe->fd = control->fd;
	sqe->cmd_op = control->encoded ? encoded : _IOC_NR(encoded);
	/* In the ring's 128-byte SQEs, the command starts at the addr3 field of short SQEs. */
	*(struct ublksrv_ctrl_cmd *)sqe->cmd = carrying;
	io_uring_sqe_set_data64(sqe, ++control->sent);
	err = io_uring_submit(&control->ring);
	if (err < 0)
		return err;
	return wait_for(control, control->sent);
}

/* Sends a command for a device with a number. */
static int command(struct ublk_control *control, uint32_t encoded, uint32_t id, uint64_t data)
{
	return send_command(control, encoded,
			    (struct ublksrv_ctrl_cmd){
				    .dev_id = id, .queue_id = UINT16_MAX, .data = { data } });
}

/* Sends one with a value of `bytes`, which is the kernel's afterwards. */
static int exchange(struct ublk_control *control, uint32_t encoded, uint32_t id, uint64_t data,
		    void *value, uint16_t bytes)
{
	int err;

	memcpy(&control->buffer, value, bytes);
	err = send_command(control, encoded,
			   (struct ublksrv_ctrl_cmd){ .dev_id = id,
						      .queue_id = UINT16_MAX,
						      .addr = (uintptr_t)&control->buffer,
						      .len = bytes,
						      .data = { data } });
	if (!err)
		memcpy(value, &control->buffer, bytes);
	return err;
}

/* What drivers return for unknown commands; -524 is the kernel's own ENOTSUPP. */
static bool is_unknown_command(int err)
{
	return err == -EOPNOTSUPP || err == -EINVAL || err == -524;
}

int ublk_control_open(struct ublk_control *control)
{
	struct io_uring_params params = { .flags = IORING_SETUP_SQE128 };
	uint64_t features = 0;
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
				msg_hint("making block devices needs root");
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
	err = exchange(control, UBLK_U_CMD_GET_FEATURES, UINT32_MAX, 0, &features,
		       sizeof(features));
	control->features = features;
	if (!err)
		return 0;
	if (!is_unknown_command(err) && err != -ENODEV) {
		msg_error("the ublk driver does not answer (GET_FEATURES): %s", strerror(-err));
		ublk_control_close(control);
		return err;
	}
	/*
	 * Kernels before 6.5 do not tell. Opcodes in ioctl form came with 6.4, and plain ones still
	 * worked.
	 */
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
	return exchange(control, UBLK_ENCODE_CTRL_WRITE(UBLK_CMD_ADD_DEV), info->dev_id, 0, info,
			sizeof(*info));
}

int ublk_get_device(struct ublk_control *control, uint32_t id, struct ublksrv_ctrl_dev_info *info)
{
	struct ublksrv_ctrl_dev_info found = {};
	int err = exchange(control, UBLK_ENCODE_CTRL_READ(UBLK_CMD_GET_DEV_INFO), id, 0, &found,
			   sizeof(found));

	if (!err)
		*info = found;
	return err;
}

int ublk_get_params(struct ublk_control *control, uint32_t id, struct ublk_params *params)
{
	*params = (struct ublk_params){ .len = sizeof(*params) };
	return exchange(control, UBLK_ENCODE_CTRL_READ(UBLK_CMD_GET_PARAMS), id, 0, params,
			sizeof(*params));
}

int ublk_set_params(struct ublk_control *control, uint32_t id, struct ublk_params *params)
{
	params->len = sizeof(*params);
	return exchange(control, UBLK_ENCODE_CTRL_WRITE(UBLK_CMD_SET_PARAMS), id, 0, params,
			sizeof(*params));
}

int ublk_get_affinity(struct ublk_control *control, uint32_t id, uint16_t queue, cpu_set_t *cpus)
{
	CPU_ZERO(cpus);
	return exchange(control, UBLK_ENCODE_CTRL_READ(UBLK_CMD_GET_QUEUE_AFFINITY), id, queue,
			cpus, sizeof(*cpus));
}

int ublk_start_device(struct ublk_control *control, uint32_t id)
{
	return command(control, UBLK_ENCODE_CTRL_WRITE(UBLK_CMD_START_DEV), id, (uint64_t)getpid());
}

int ublk_stop_device(struct ublk_control *control, uint32_t id)
{
	return command(control, UBLK_ENCODE_CTRL_WRITE(UBLK_CMD_STOP_DEV), id, 0);
}

int ublk_try_stop_device(struct ublk_control *control, uint32_t id)
{
	return command(control, UBLK_U_CMD_TRY_STOP_DEV, id, 0);
}

int ublk_start_recovery(struct ublk_control *control, uint32_t id)
{
	return command(control, UBLK_ENCODE_CTRL_WRITE(UBLK_CMD_START_USER_RECOVERY), id, 0);
}

int ublk_end_recovery(struct ublk_control *control, uint32_t id)
{
	return command(control, UBLK_ENCODE_CTRL_WRITE(UBLK_CMD_END_USER_RECOVERY), id,
		       (uint64_t)getpid());
}

int ublk_quiesce_device(struct ublk_control *control, uint32_t id, unsigned wait_ms)
{
	return command(control, UBLK_U_CMD_QUIESCE_DEV, id, wait_ms);
}

int ublk_update_size(struct ublk_control *control, uint32_t id, uint64_t bytes)
{
	return command(control, UBLK_U_CMD_UPDATE_SIZE, id, bytes >> 9);
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
	if (control->encoded) {
		int err = command(control, UBLK_U_CMD_DEL_DEV_ASYNC, id, 0);

		if (!is_unknown_command(err))
			return err;
	}
	return command(control, UBLK_ENCODE_CTRL_WRITE(UBLK_CMD_DEL_DEV), id, 0);
}
