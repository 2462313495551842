/* SPDX-License-Identifier: MIT */
#include "server/frontend/fuse_queue.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

#include "base/size.h"

/* As often, a thread looks whether it needs help: a look costs what a small read does. */
enum { LOOK_BYTES = 64 << 10 };

/* The queue of the calling thread: libfuse passes no context of a thread through. */
static __thread struct fuse_queue *own_queue;

static ssize_t read_request(int fd, void *data, size_t bytes, void *userdata)
{
	(void)fd;
	(void)userdata;
	return read(own_queue->device_fd, data, bytes);
}

static ssize_t write_reply(int fd, struct iovec *parts, int count, void *userdata)
{
	ssize_t bytes = 0;

	(void)fd;
	(void)userdata;
	if (!own_queue) {
		/* Of fuse_introduce(): no kernel has asked. */
		for (int i = 0; i < count; i++)
			bytes += (ssize_t)parts[i].iov_len;
		return bytes;
	}
	return writev(own_queue->device_fd, parts, count);
}

const struct fuse_custom_io fuse_queue_io = {
	.read = read_request,
	.writev = write_reply,
};

/* A reply that the kernel no longer wants (ENOENT) is no failure. */
static void reply(fuse_req_t request, const struct io *io)
{
	if (io->result < 0)
		fuse_reply_err(request, -io->result);
	else if (io->op == IO_OP_READ)
		fuse_reply_buf(request, (const char *)io->data, io->length);
	else if (io->op == IO_OP_WRITE)
		fuse_reply_write(request, io->length);
	else
		fuse_reply_err(request, 0);
}

static void io_done(struct io *io)
{
	struct fuse_tag *tag = (struct fuse_tag *)io; /* its first member */
	struct fuse_queue *queue = tag->queue;

	reply(tag->request, io);
	queue->running--;
	tag->next_free = queue->free_tags;
	queue->free_tags = tag;
}

/* What FOPEN_DIRECT_IO lets through: only whole blocks, as from O_DIRECT on a disk. */
static int check_range(const struct fuse_queue *queue, enum io_op op, uint64_t offset,
		       size_t length)
{
	if (offset % BLOCK_BYTES || length % BLOCK_BYTES || length > UINT32_MAX)
		return -EINVAL;
	if ((op == IO_OP_READ || op == IO_OP_WRITE) && length > queue->buffer_bytes)
		return -EIO;
	return 0;
}

static void call_for_help(struct fuse_crew *crew)
{
	unsigned resting = __atomic_load_n(&crew->resting, __ATOMIC_SEQ_CST);

	while (resting && !__atomic_compare_exchange_n(&crew->resting, &resting, resting - 1, false,
						       __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
		;
	if (resting)
		sem_post(&crew->calls);
}

/* Before a request is served: others may be waiting behind it. */
static void look_for_more(struct fuse_queue *queue, size_t bytes)
{
	struct pollfd connection = { .fd = queue->device_fd, .events = POLLIN };

	queue->unseen += bytes;
	if (queue->unseen < LOOK_BYTES || !__atomic_load_n(&queue->crew->resting, __ATOMIC_RELAXED))
		return;
	queue->unseen = 0;
	if (poll(&connection, 1, 0) > 0 && connection.revents & POLLIN)
		call_for_help(queue->crew);
}

void fuse_queue_submit(fuse_req_t request, enum io_op op, uint64_t offset, size_t length,
		       const void *data, bool flag)
{
	struct fuse_queue *queue = own_queue;
	struct fuse_tag *tag = queue->free_tags; /* there is one, or nothing is received */
	struct io *io = &tag->io;
	int err = check_range(queue, op, offset, length);

	if (err) {
		worker_count_refusal(queue->worker);
		fuse_reply_err(request, -err);
		return;
	}
	look_for_more(queue, length);
	queue->free_tags = tag->next_free;
	queue->running++;
	tag->request = request;
	*io = (struct io){
		.op = op,
		.fua = op == IO_OP_WRITE && flag,
		.no_unmap = op == IO_OP_WRITE_ZEROES && flag,
		.length = (uint32_t)length,
		.offset = offset,
		.data = tag->buffer,
		.uniform = op == IO_OP_WRITE ? (struct uniform){} : io->uniform,
	};
	if (op == IO_OP_WRITE)
		memcpy(tag->buffer, data, length);
	engine_submit(queue->worker, io);
}

static int init_ring(struct fuse_queue *queue)
{
	static const unsigned flag_sets[] = {
		IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_COOP_TASKRUN, /* 6.0 */
		0,
	};
	const struct engine *engine = queue->worker->engine;
	int err = -EINVAL;

	for (unsigned i = 0; i < sizeof(flag_sets) / sizeof(*flag_sets) && err == -EINVAL; i++)
		err = io_uring_queue_init(queue->depth, &queue->ring, flag_sets[i]);
	if (err)
		return err;
	queue->ring_ready = true;
	queue->worker->ring = &queue->ring;
	queue->worker->io_done = io_done;
	if (!engine->file_count)
		return 0;
	return io_uring_register_files(&queue->ring, engine->files, engine->file_count);
}

static int allocate_tags(struct fuse_queue *queue)
{
	size_t bytes = (size_t)queue->depth * queue->buffer_bytes;
	void *buffers = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
			     MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);

	if (buffers == MAP_FAILED)
		return -errno;
	queue->buffers = buffers;
	queue->tags = calloc(queue->depth, sizeof(*queue->tags));
	if (!queue->tags)
		return -ENOMEM;
	for (unsigned i = 0; i < queue->depth; i++) {
		struct fuse_tag *tag = &queue->tags[i];

		tag->queue = queue;
		tag->buffer = queue->buffers + (size_t)i * queue->buffer_bytes;
		tag->next_free = queue->free_tags;
		queue->free_tags = tag;
	}
	return 0;
}

static int set_blocking(struct fuse_queue *queue, bool blocking)
{
	if (queue->blocking == blocking)
		return 0;
	if (fcntl(queue->device_fd, F_SETFL, blocking ? 0 : O_NONBLOCK))
		return -errno;
	queue->blocking = blocking;
	return 0;
}

static int queue_init(void *owner)
{
	struct fuse_queue *queue = owner;
	int err = worker_prepare(queue->worker);

	own_queue = queue;
	if (!err)
		err = allocate_tags(queue);
	/* A server before this one may have left it otherwise. */
	queue->blocking = false;
	if (!err)
		err = set_blocking(queue, true);
	return err ? err : init_ring(queue);
}

static void queue_deinit(void *owner)
{
	struct fuse_queue *queue = owner;

	if (queue->ring_ready)
		io_uring_queue_exit(&queue->ring);
	queue->worker->ring = NULL;
	if (queue->buffers)
		munmap(queue->buffers, (size_t)queue->depth * queue->buffer_bytes);
	free(queue->tags);
	free(queue->received.mem);
}

static void handle_completions(struct fuse_queue *queue)
{
	struct io_uring_cqe *cqe;

	/* One at a time: an answer may need another SQE, whose completion comes here too. */
	while (!io_uring_peek_cqe(&queue->ring, &cqe)) {
		struct io *io = io_uring_cqe_get_data(cqe);
		int result = cqe->res;

		io_uring_cqe_seen(&queue->ring, cqe);
		engine_complete(io, result);
	}
	worker_end_round(queue->worker);
}

/* Gives to the kernel what the engine has prepared; much of it is complete at once. */
static int settle(struct fuse_queue *queue)
{
	while (io_uring_sq_ready(&queue->ring)) {
		int err = io_uring_submit(&queue->ring);

		if (err < 0 && err != -EINTR && err != -EAGAIN && err != -EBUSY)
			return err;
		handle_completions(queue);
	}
	return 0;
}

static enum fuse_phase phase_of(const struct fuse_queue *queue)
{
	return __atomic_load_n(queue->phase, __ATOMIC_ACQUIRE);
}

/* Waits until the ring or, if it may be taken, the connection has something. */
static int wait_for_either(struct fuse_queue *queue)
{
	bool may_take = queue->free_tags && phase_of(queue) != FUSE_LEAVE;
	struct pollfd fds[] = {
		{ .fd = queue->ring.ring_fd, .events = POLLIN },
		{ .fd = may_take ? queue->device_fd : -1, .events = POLLIN },
	};

	if (poll(fds, 2, -1) < 0)
		return errno == EINTR ? 0 : -errno;
	handle_completions(queue);
	return 0;
}

/*
 * For a thread that has nothing to do. The first time, it is only entered as resting: a request that
 * came before, and whose receiver saw nobody to call, is still to be looked for.
 */
static void rest(struct fuse_queue *queue)
{
	if (!queue->resting) {
		queue->resting = true;
		__atomic_add_fetch(&queue->crew->resting, 1, __ATOMIC_SEQ_CST);
		return;
	}
	while (sem_wait(&queue->crew->calls) && phase_of(queue) == FUSE_SERVE)
		;
	queue->resting = false;
}

/* It has found something to do before it was asleep. */
static void end_rest(struct fuse_queue *queue)
{
	struct fuse_crew *crew = queue->crew;
	unsigned resting = __atomic_load_n(&crew->resting, __ATOMIC_SEQ_CST);

	queue->resting = false;
	while (resting && !__atomic_compare_exchange_n(&crew->resting, &resting, resting - 1, false,
						       __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
		;
	/* All have been called: one of these calls was for this thread. */
	while (!resting && sem_wait(&crew->calls) && phase_of(queue) == FUSE_SERVE)
		;
}

/* Whether this thread is the leader, or is now. */
static bool lead(struct fuse_queue *queue)
{
	int leader = __atomic_load_n(&queue->crew->leader, __ATOMIC_SEQ_CST);

	if (leader == FUSE_NO_LEADER &&
	    __atomic_compare_exchange_n(&queue->crew->leader, &leader, queue->index, false,
					__ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
		leader = queue->index;
	return leader == queue->index;
}

/* It can take no more, so another one has to wait for requests. */
static void step_down(struct fuse_queue *queue)
{
	int leader = queue->index;

	if (__atomic_compare_exchange_n(&queue->crew->leader, &leader, FUSE_NO_LEADER, false,
					__ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
		call_for_help(queue->crew);
}

/*
 * Receive one request and serve it. The leader waits for it in read(2), which is the cheapest way, as
 * long as nothing runs; otherwise a thread must not wait, as another one may take the request that
 * poll(2) has announced. Returns false, with the end of the thread in `error`, when it is over.
 */
static bool receive(struct fuse_queue *queue, enum fuse_phase phase, int *error)
{
	bool leads = phase == FUSE_SERVE && lead(queue);
	int err = set_blocking(queue, leads && !queue->running);

	if (leads && queue->resting)
		end_rest(queue);
	if (!err)
		err = fuse_session_receive_buf(queue->session, &queue->received);
	if (err > 0) {
		if (queue->resting)
			end_rest(queue);
		fuse_session_process_buf(queue->session, &queue->received);
		worker_end_round(queue->worker);
		return true;
	}
	if (err == -EINTR)
		return true;
	*error = err == -EAGAIN ? 0 : (err ?: -ENOTCONN); /* 0: the kernel has ended it */
	if (err != -EAGAIN)
		return false;
	if (phase == FUSE_SERVE && !leads && !queue->running)
		rest(queue);
	return phase == FUSE_SERVE || queue->running;
}

static int queue_serve(void *owner)
{
	struct fuse_queue *queue = owner;

	for (;;) {
		enum fuse_phase phase = phase_of(queue);
		int err = settle(queue);

		if (!err && queue->running) {
			if (!queue->free_tags)
				step_down(queue);
			err = wait_for_either(queue);
		}
		if (err || (phase == FUSE_LEAVE && !queue->running))
			return err;
		if (phase == FUSE_LEAVE || !queue->free_tags)
			continue;
		if (!receive(queue, phase, &err))
			return err;
	}
}

static const struct thread_ops queue_thread = {
	.init = queue_init,
	.serve = queue_serve,
	.deinit = queue_deinit,
};

int fuse_queue_start(struct fuse_queue *queue)
{
	queue->thread.ops = &queue_thread;
	queue->thread.owner = queue;
	return thread_start(&queue->thread);
}

bool fuse_queue_stop_within(struct fuse_queue *queue, unsigned wait_ms)
{
	pthread_kill(queue->thread.id, FUSE_QUEUE_SIGNAL);
	return thread_join_within(&queue->thread, wait_ms);
}
