/* SPDX-License-Identifier: MIT */
#include "server/frontend/ublk_queue.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/message.h"
#include "base/size.h"

enum { SECTOR_SHIFT = 9 };

/*
 * user_data of an SQE is the tag's address. Bit 0 distinguishes commands to the driver from the I/O
 * of segments.
 */
#define DRIVER_COMMAND 1u

static struct ublk_tag *tag_of(struct io *io)
{
	return (struct ublk_tag *)io; /* its first member */
}

static void offer_tag(struct ublk_tag *tag, uint32_t opcode, int32_t result)
{
	struct ublk_queue *queue = tag->queue;
	struct io_uring_sqe *sqe = worker_get_sqe(queue->worker);
	struct ublksrv_io_cmd *command = (struct ublksrv_io_cmd *)sqe->cmd;

	memset(sqe, 0, sizeof(*sqe));
	sqe->opcode = IORING_OP_URING_CMD;
	sqe->fd = 0; /* of the ring's file table */
	sqe->flags = IOSQE_FIXED_FILE;
	sqe->cmd_op = queue->encoded ? UBLK_ENCODE_IO(opcode) : opcode;
	command->q_id = queue->index;
	command->tag = tag->tag;
	command->result = result;
	if (queue->registered)
		/* struct ublk_auto_buf_reg: the index, then flags */
		sqe->addr = tag->tag | (uint64_t)UBLK_AUTO_BUF_REG_FALLBACK << 16;
	else
		command->addr =
			(uintptr_t)(queue->buffers + (size_t)tag->tag * queue->buffer_bytes);
	io_uring_sqe_set_data64(sqe, (uintptr_t)tag | DRIVER_COMMAND);
	queue->offered++;
}

static void io_done(struct io *io)
{
	struct ublk_tag *tag = tag_of(io);
	bool data = io->op == IO_OP_READ || io->op == IO_OP_WRITE;

	tag->queue->running--;
	offer_tag(tag, UBLK_IO_COMMIT_AND_FETCH_REQ,
		  io->result < 0 ? io->result : (data ? (int32_t)io->length : 0));
}

/* See worker.copy. */
static int copy_data(struct io *io, uint32_t offset, uint32_t length)
{
	const struct ublk_tag *tag = tag_of(io);
	const struct ublk_queue *queue = tag->queue;
	uint64_t place = UBLKSRV_IO_BUF_OFFSET + ((uint64_t)queue->index << UBLK_QID_OFF) +
			 ((uint64_t)tag->tag << UBLK_TAG_OFF);

	while (length) {
		off_t at = (off_t)(place + offset);
		ssize_t moved = io->op == IO_OP_READ ?
					pwrite(queue->device_fd, io->data + offset, length, at) :
					pread(queue->device_fd, io->data + offset, length, at);

		if (moved < 0 && errno == EINTR)
			continue;
		if (moved <= 0)
			return moved < 0 ? -errno : -EIO;
		offset += (uint32_t)moved;
		length -= (uint32_t)moved;
	}
	return 0;
}

/* Returns false for operations that this server has never announced. */
static bool decode(const struct ublksrv_io_desc *descriptor, struct io *io)
{
	/* NB: UBLK_IO_F_* are bits of op_flags itself, not of ublksrv_get_flags(). */
	uint32_t op_flags = descriptor->op_flags;

	switch (ublksrv_get_op(descriptor)) {
	case UBLK_IO_OP_READ:
		io->op = IO_OP_READ;
		break;
	case UBLK_IO_OP_WRITE:
		io->op = IO_OP_WRITE;
		break;
	case UBLK_IO_OP_FLUSH:
		io->op = IO_OP_FLUSH;
		break;
	case UBLK_IO_OP_DISCARD:
		io->op = IO_OP_DISCARD;
		break;
	case UBLK_IO_OP_WRITE_ZEROES:
		io->op = IO_OP_WRITE_ZEROES;
		break;
	default:
		return false;
	}
	io->fua = op_flags & UBLK_IO_F_FUA;
	io->no_unmap = op_flags & UBLK_IO_F_NOUNMAP;
	io->has_fixed = io->detached && !(op_flags & UBLK_IO_F_NEED_REG_BUF);
	io->offset = descriptor->start_sector << SECTOR_SHIFT;
	io->length = descriptor->nr_sectors << SECTOR_SHIFT;
	return true;
}

static void start_request(struct ublk_tag *tag)
{
	struct ublk_queue *queue = tag->queue;
	struct io *io = &tag->io;

	queue->running++;
	io->data = queue->buffers + (size_t)tag->tag * queue->buffer_bytes;
	io->result = 0;
	/* Whatever the request is, the kernel may have put its data into our buffer. */
	if (!io->detached && ublksrv_get_op(&queue->descriptors[tag->tag]) != UBLK_IO_OP_READ)
		io->uniform.length = 0;
	if (!decode(&queue->descriptors[tag->tag], io))
		io->result = -EOPNOTSUPP;
	else if ((io->op == IO_OP_READ || io->op == IO_OP_WRITE) &&
		 io->length > queue->buffer_bytes)
		io->result = -EIO;
	if (!io->result) {
		engine_submit(queue->worker, io);
		return;
	}
	worker_count_refusal(queue->worker);
	io_done(io);
}

/* Returns 0, or a negative errno when the queue cannot go on. */
static int handle_command(struct ublk_queue *queue, struct ublk_tag *tag, int result)
{
	queue->offered--;
	if (result == UBLK_IO_RES_OK) {
		start_request(tag);
		return 0;
	}
	if (result != UBLK_IO_RES_ABORT)
		return result;
	/* The device is being stopped, or quiesced, so the tag is not offered again. */
	queue->aborted = true;
	return 0;
}

static int handle_completions(struct ublk_queue *queue)
{
	struct io_uring_cqe *cqe;
	unsigned head, seen = 0;
	int err = 0;

	io_uring_for_each_cqe(&queue->ring, head, cqe)
	{
		uint64_t data = cqe->user_data;

		seen++;
		if (data & DRIVER_COMMAND) {
			struct ublk_tag *tag = (struct ublk_tag *)(uintptr_t)(data & ~1ull);
			int ret = handle_command(queue, tag, cqe->res);

			if (ret && !err)
				err = ret;
		} else {
			engine_complete((struct io *)(uintptr_t)data, cqe->res);
		}
	}
	io_uring_cq_advance(&queue->ring, seen);
	/* Answers leave with the next submit, which follows at once. */
	worker_end_round(queue->worker);
	return err;
}

/* A tag that was in flight when the device was quiesced is offered again, and is never aborted. */
static bool is_drained(const struct ublk_queue *queue)
{
	return queue->aborted && !queue->running &&
	       __atomic_load_n(queue->draining, __ATOMIC_ACQUIRE);
}

static int queue_serve(void *owner)
{
	struct ublk_queue *queue = owner;
	int failure = 0;

	while ((queue->offered || queue->running) && !is_drained(queue)) {
		int err = io_uring_submit_and_wait(&queue->ring, 1);

		if (err < 0 && err != -EINTR && err != -EAGAIN && err != -EBUSY)
			return err;
		err = handle_completions(queue);
		if (err && !failure) {
			msg_error("queue %u: the driver refused a tag: %s", queue->index,
				  strerror(-err));
			failure = err;
			/*
			 * Tell now, because other tags may keep this thread running for any length
			 * of time.
			 */
			eventfd_write(queue->thread.ended_fd, 1);
		}
	}
	/* Send the last answers, when nothing more is waited for. */
	io_uring_submit(&queue->ring);
	return failure;
}

/*
 * Tries one set of ring flags after the other, newest first: DEFER_TASKRUN is 6.1, COOP_TASKRUN
 * 5.19.
 */
static int init_ring(struct ublk_queue *queue)
{
	static const unsigned flag_sets[] = {
		IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN,
		IORING_SETUP_COOP_TASKRUN,
		0,
	};
	int err = -EINVAL;

	for (unsigned i = 0; i < sizeof(flag_sets) / sizeof(*flag_sets) && err == -EINVAL; i++) {
		struct io_uring_params params = { .flags = flag_sets[i] };

		err = io_uring_queue_init_params(queue->depth, &queue->ring, &params);
	}
	return err;
}

/* File 0 of the table is the ublk device; the segments' files follow. */
static int register_files(struct ublk_queue *queue)
{
	const struct engine *engine = queue->worker->engine;
	int *files = calloc(engine->file_count + 1, sizeof(*files));
	int err;

	if (!files)
		return -ENOMEM;
	files[0] = queue->device_fd;
	for (unsigned i = 0; i < engine->file_count; i++)
		files[1 + i] = engine->files[i];
	queue->worker->first_file = 1;
	err = io_uring_register_files(&queue->ring, files, engine->file_count + 1);
	free(files);
	return err;
}

static size_t descriptor_bytes(unsigned depth)
{
	return round_up_u64(depth * sizeof(struct ublksrv_io_desc), (uint64_t)getpagesize());
}

static int map_descriptors(struct ublk_queue *queue)
{
	/* NB: queues are UBLK_MAX_QUEUE_DEPTH descriptors apart, whatever their depth. */
	off_t offset = UBLKSRV_CMD_BUF_OFFSET +
		       (off_t)(queue->index * descriptor_bytes(UBLK_MAX_QUEUE_DEPTH));
	void *map = mmap(NULL, descriptor_bytes(queue->depth), PROT_READ, MAP_SHARED,
			 queue->device_fd, offset);

	if (map == MAP_FAILED)
		return -errno;
	queue->descriptors = map;
	return 0;
}

static int allocate_tags(struct ublk_queue *queue)
{
	size_t bytes = (size_t)queue->depth * queue->buffer_bytes;
	void *buffers =
		mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	if (buffers == MAP_FAILED)
		return -errno;
	queue->buffers = buffers;
	/*
	 * NB: MAP_POPULATE has no effect in a process that locks its memory on faults
	 * (lock_memory()).
	 */
	if (madvise(buffers, bytes, MADV_POPULATE_WRITE))
		return -errno;
	queue->tags = calloc(queue->depth, sizeof(*queue->tags));
	if (!queue->tags)
		return -ENOMEM;
	for (unsigned i = 0; i < queue->depth; i++) {
		queue->tags[i].queue = queue;
		queue->tags[i].tag = (uint16_t)i;
		queue->tags[i].io.detached = queue->registered;
		queue->tags[i].io.fixed = (uint16_t)i;
	}
	return 0;
}

/*
 * A command that the driver refuses completes at once. Requests may be waiting for a device that is
 * taken over; they come as soon as the last tag of the last queue is there.
 */
static int refused_tag(struct ublk_queue *queue)
{
	struct io_uring_cqe *cqe;
	unsigned head;

	io_uring_for_each_cqe(&queue->ring, head, cqe)
	{
		if (cqe->res < 0)
			return cqe->res;
	}
	return 0;
}

/*
 * NB: offer all tags in one system call, which signals do not divide, and before
 * map_descriptors(). A driver before 6.15 can only take back a queue that has fetched all of its tags or
 * none, and a device that is mapped only if one queue has fetched (ublk_refetch.h).
 */
static int fetch_all(struct ublk_queue *queue)
{
	int err;

	for (unsigned i = 0; i < queue->depth; i++)
		offer_tag(&queue->tags[i], UBLK_IO_FETCH_REQ, 0);
	err = io_uring_submit(&queue->ring);
	return err < 0 ? err : refused_tag(queue);
}

/*
 * A batch thread does not preempt the thread that wakes it: a submitter with more to submit
 * continues, and its requests are served together. On Linux 7.2, on one CPU, io_uring readers get
 * half as much again, and others lose nothing; see docs/features.md.
 */
static void serve_in_batches(void)
{
	/* Not if a policy was chosen for this process. */
	if (sched_getscheduler(0) == SCHED_OTHER)
		sched_setscheduler(0, SCHED_BATCH, &(struct sched_param){});
}

static int queue_init(void *owner)
{
	struct ublk_queue *queue = owner;
	int err = worker_prepare(queue->worker);

	serve_in_batches();
	if (!err)
		err = allocate_tags(queue);
	if (!err)
		err = init_ring(queue);
	if (err)
		return err;
	queue->worker->ring = &queue->ring;
	queue->worker->io_done = io_done;
	queue->worker->copy = copy_data;
	err = register_files(queue);
	if (!err && queue->registered)
		err = io_uring_register_buffers_sparse(&queue->ring, queue->depth);
	if (err)
		return err;
	/* Saves the kernel a look-up per call. 5.18; optional. */
	io_uring_register_ring_fd(&queue->ring);
	err = fetch_all(queue);
	return err ?: map_descriptors(queue);
}

static void queue_deinit(void *owner)
{
	struct ublk_queue *queue = owner;

	if (queue->worker->ring) {
		io_uring_queue_exit(&queue->ring);
		queue->worker->ring = NULL;
	}
	if (queue->descriptors)
		munmap((void *)queue->descriptors, descriptor_bytes(queue->depth));
	if (queue->buffers)
		munmap(queue->buffers, (size_t)queue->depth * queue->buffer_bytes);
	free(queue->tags);
}

static const struct thread_ops queue_thread = {
	.init = queue_init,
	.serve = queue_serve,
	.deinit = queue_deinit,
};

int ublk_queue_start(struct ublk_queue *queue)
{
	queue->thread.ops = &queue_thread;
	queue->thread.owner = queue;
	return thread_start(&queue->thread);
}

void ublk_queue_join(struct ublk_queue *queue)
{
	thread_join(&queue->thread);
}

bool ublk_queue_join_within(struct ublk_queue *queue, unsigned wait_ms)
{
	return thread_join_within(&queue->thread, wait_ms);
}
