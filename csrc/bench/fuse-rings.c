/* SPDX-License-Identifier: MIT */
/*
 * FUSE over io_uring (Linux 6.14): each CPU has a queue, whose entries wait in the kernel. An entry
 * completes with a request, and is committed with the answer to it.
 */
#include <errno.h>
#include <liburing.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/sysinfo.h>
#include <sys/uio.h>
#include <unistd.h>

#include "base/message.h"
#include "bench/fuse-stand-in.h"

enum {
	DEPTH = 32,
	SQE_BYTES = 128,
};

struct entry {
	struct fuse_uring_req_header header;
	uint8_t *payload;
	struct iovec vectors[2];
};

struct queue {
	const struct stand_in *server;
	struct io_uring ring;
	unsigned cpu;
	pthread_t thread;
	struct entry entries[DEPTH];
};

/* The ring has a submission entry for each entry, so one is always free. */
static void submit(struct queue *queue, struct entry *entry, enum fuse_uring_cmd command,
		   uint64_t commit_id)
{
	struct io_uring_sqe *sqe = io_uring_get_sqe(&queue->ring);
	struct fuse_uring_cmd_req *request;

	if (!sqe)
		abort();
	request = (struct fuse_uring_cmd_req *)sqe->cmd;
	memset(sqe, 0, SQE_BYTES);
	sqe->opcode = IORING_OP_URING_CMD;
	sqe->fd = queue->server->fuse_fd;
	sqe->cmd_op = command;
	sqe->addr = (uintptr_t)entry->vectors;
	sqe->len = 2;
	io_uring_sqe_set_data(sqe, entry);
	request->qid = (uint16_t)queue->cpu;
	request->commit_id = commit_id;
}

static void answer(struct queue *queue, struct entry *entry)
{
	struct fuse_uring_req_header *header = &entry->header;
	const struct fuse_in_header request = *(struct fuse_in_header *)header->in_out;
	uint64_t commit_id = header->ring_ent_in_out.commit_id;
	struct answer answer;

	stand_in_answer(queue->server, &request, header->op_in, entry->payload, &answer);
	if (!answer.error && answer.size)
		memcpy(entry->payload, answer.data, answer.size);
	*(struct fuse_out_header *)header->in_out = (struct fuse_out_header){
		.len = (uint32_t)(sizeof(struct fuse_out_header) + answer.size),
		.error = answer.error,
		.unique = request.unique,
	};
	header->ring_ent_in_out.payload_sz = answer.error ? 0 : (uint32_t)answer.size;
	submit(queue, entry, FUSE_IO_URING_CMD_COMMIT_AND_FETCH, commit_id);
}

/* Call this in the thread that will submit (IORING_SETUP_SINGLE_ISSUER). */
static int prepare(struct queue *queue)
{
	struct io_uring_params parameters = {
		.flags = IORING_SETUP_SQE128 | IORING_SETUP_SINGLE_ISSUER,
	};
	int err = io_uring_queue_init_params(DEPTH, &queue->ring, &parameters);

	for (unsigned i = 0; !err && i < DEPTH; i++) {
		struct entry *entry = &queue->entries[i];

		entry->payload = aligned_alloc(4096, STAND_IN_MAX_BYTES);
		if (!entry->payload)
			return -ENOMEM;
		entry->vectors[0] = (struct iovec){ &entry->header, sizeof(entry->header) };
		entry->vectors[1] = (struct iovec){ entry->payload, STAND_IN_MAX_BYTES };
	}
	return err;
}

static void *queue_main(void *argument)
{
	struct queue *queue = argument;
	struct io_uring_cqe *cqe;
	unsigned head, seen;
	cpu_set_t cpus;
	int result;

	CPU_ZERO(&cpus);
	CPU_SET(queue->cpu, &cpus);
	/* This fails for a CPU that is offline. Then its queue stays empty. */
	pthread_setaffinity_np(pthread_self(), sizeof(cpus), &cpus);
	result = prepare(queue);
	for (unsigned i = 0; !result && i < DEPTH; i++)
		submit(queue, &queue->entries[i], FUSE_IO_URING_CMD_REGISTER, 0);
	while (result >= 0 || result == -EINTR) {
		result = io_uring_submit_and_wait(&queue->ring, 1);
		seen = 0;
		io_uring_for_each_cqe(&queue->ring, head, cqe)
		{
			seen++;
			if (cqe->res < 0) {
				result = cqe->res;
				break;
			}
			answer(queue, io_uring_cqe_get_data(cqe));
		}
		io_uring_cq_advance(&queue->ring, seen);
	}
	if (result == -ENOTCONN) /* the file system was unmounted */
		return NULL;
	msg_error("the queue of CPU %u: %s", queue->cpu, strerror(-result));
	_exit(EXIT_FAILED); /* without this queue, requests would wait for ever */
}

int stand_in_start_rings(const struct stand_in *server)
{
	unsigned count = (unsigned)get_nprocs_conf();
	struct queue *queues = calloc(count, sizeof(*queues));
	int err = queues ? 0 : -ENOMEM;

	for (unsigned cpu = 0; !err && cpu < count; cpu++) {
		queues[cpu].server = server;
		queues[cpu].cpu = cpu;
		err = -pthread_create(&queues[cpu].thread, NULL, queue_main, &queues[cpu]);
	}
	return err;
}
