/* SPDX-License-Identifier: MIT */
#include "server/frontend/ublk_refetch.h"

#include <errno.h>
#include <liburing.h>
#include <pthread.h>
#include <stdint.h>
#include <string.h>

#include "base/message.h"

struct refetch {
	const struct ublksrv_ctrl_dev_info *info;
	struct io_uring ring;
	int device_fd;
	bool encoded;
	int error;
};

static int prepare_fetch(struct refetch *refetch, uint16_t queue, uint16_t tag)
{
	struct io_uring_sqe *sqe = io_uring_get_sqe(&refetch->ring);
	struct ublksrv_io_cmd *command;

	if (!sqe)
		return -EBUSY;
	command = (struct ublksrv_io_cmd *)sqe->cmd;
	memset(sqe, 0, sizeof(*sqe));
	sqe->opcode = IORING_OP_URING_CMD;
	sqe->fd = refetch->device_fd;
	sqe->cmd_op = refetch->encoded ? UBLK_ENCODE_IO(UBLK_IO_FETCH_REQ) : UBLK_IO_FETCH_REQ;
	command->q_id = queue;
	command->tag = tag;
	/* Nothing is written there, but it must not be NULL. */
	command->addr = (uintptr_t)refetch;
	return 0;
}

/*
 * NB: offer all tags of a queue in one system call, which signals do not divide: the driver cannot
 * take back a queue when only some of its tags were fetched.
 */
static int fetch_queue(struct refetch *refetch, uint16_t queue)
{
	unsigned depth = refetch->info->queue_depth, refused = 0;
	struct io_uring_cqe *cqe;
	int err;

	for (unsigned tag = 0; tag < depth; tag++) {
		err = prepare_fetch(refetch, queue, (uint16_t)tag);
		if (err)
			return err;
	}
	err = io_uring_submit(&refetch->ring);
	if (err < 0)
		return err;
	for (; !io_uring_peek_cqe(&refetch->ring, &cqe); refused++)
		io_uring_cqe_seen(&refetch->ring, cqe);
	/* All are refused if the driver remembers a thread, which is not this one. */
	return refused && refused != depth ? -EPROTO : 0;
}

static void *fetch_all(void *argument)
{
	struct refetch *refetch = argument;

	for (unsigned i = 0; i < refetch->info->nr_hw_queues && !refetch->error; i++)
		refetch->error = fetch_queue(refetch, (uint16_t)i);
	return NULL; /* when this thread ends, the kernel takes the commands back */
}

static int run_thread(struct refetch *refetch)
{
	pthread_t thread;
	int err = -pthread_create(&thread, NULL, fetch_all, refetch);

	if (err)
		return err;
	pthread_join(thread, NULL);
	return refetch->error;
}

int ublk_refetch(int device_fd, const struct ublksrv_ctrl_dev_info *info, bool encoded)
{
	struct refetch refetch = { .info = info, .device_fd = device_fd, .encoded = encoded };
	int err = io_uring_queue_init(info->queue_depth, &refetch.ring, 0);

	if (!err) {
		err = run_thread(&refetch);
		io_uring_queue_exit(&refetch.ring);
	}
	if (err)
		msg_error("cannot prepare ublk device %u to be taken over (FETCH_REQ): %s",
			  info->dev_id, strerror(-err));
	return err;
}
