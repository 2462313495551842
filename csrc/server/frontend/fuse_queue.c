/* SPDX-License-Identifier: MIT */
#include "server/frontend/fuse_queue.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/uio.h>
#include <unistd.h>

#include "base/relaxed.h"
#include "base/size.h"

enum {
	/* How often a thread checks whether it needs help: a check costs as much as a small read. */
	LOOK_BYTES = 64 << 10,
	LENT_LOOK_MS = 10,
};

/* The queue of the calling thread, because libfuse passes no context through. */
static __thread struct fuse_queue *own_queue;
/*
 * Where the calling thread writes replies: the descriptor that the request came from, as the kernel
 * looks for it there. -1: nowhere.
 */
static __thread int reply_fd = -1;

static ssize_t read_request(int fd, void *data, size_t bytes, void *userdata)
{
	size_t room = FUSE_REQUEST_BYTES + own_queue->journal->buffer_bytes;

	return read(own_queue->device_fd, data, bytes < room ? bytes : room);
}

static ssize_t write_reply(int fd, struct iovec *parts, int count, void *userdata)
{
	ssize_t bytes = 0;

	if (reply_fd < 0) {
		/* fuse_introduce() has called, so there is no kernel request to answer. */
		for (int i = 0; i < count; i++)
			bytes += (ssize_t)parts[i].iov_len;
		return bytes;
	}
	return writev(reply_fd, parts, count);
}

const struct fuse_custom_io fuse_queue_io = {
	.read = read_request,
	.writev = write_reply,
};

/* ENOENT is no failure: the kernel does not want the reply any more. */
static void reply(fuse_req_t request, const struct io *io, const uint8_t *data)
{
	if (io->result < 0)
		fuse_reply_err(request, -io->result);
	else if (io->op == IO_OP_READ)
		fuse_reply_buf(request, (const char *)data, io->length);
	else if (io->op == IO_OP_WRITE)
		fuse_reply_write(request, io->length);
	else
		fuse_reply_err(request, 0);
}

static void free_tag(struct fuse_tag *tag)
{
	struct fuse_queue *queue = tag->queue;

	tag->next_free = queue->free_tags;
	queue->free_tags = tag;
}

static void io_done(struct io *io)
{
	struct fuse_tag *tag = (struct fuse_tag *)io; /* its first member */

	if (io->op != IO_OP_READ)
		fuse_record_execute(tag->record, io->result);
	reply(tag->request, io, io->data);
	fuse_record_clear(tag->record);
	tag->queue->running--;
	free_tag(tag);
}

/* See worker.reply. The record stays until the reply has left, whichever thread sends it. */
static void reply_anywhere(struct io *io, const uint8_t *data)
{
	struct fuse_tag *tag = (struct fuse_tag *)io;
	int own_fd = reply_fd; /* it may be the thread of another queue */

	reply_fd = tag->queue->device_fd;
	reply(tag->request, io, data);
	fuse_record_clear(tag->record);
	reply_fd = own_fd;
}

static void io_back(struct io *io)
{
	struct fuse_tag *tag = (struct fuse_tag *)io;

	tag->queue->running--;
	free_tag(tag);
}

/* Whether it waits for something itself, and not only for other threads' answers. */
static bool is_busy(const struct fuse_queue *queue)
{
	return queue->running > queue->worker->lent;
}

/* FOPEN_DIRECT_IO lets any range through; accept only whole blocks, like a disk with O_DIRECT. */
static int check_range(const struct fuse_queue *queue, enum io_op op, uint64_t offset,
		       size_t length)
{
	if (offset % BLOCK_BYTES || length % BLOCK_BYTES || length > UINT32_MAX)
		return -EINVAL;
	if ((op == IO_OP_READ || op == IO_OP_WRITE) && length > queue->journal->buffer_bytes)
		return -EIO;
	return 0;
}

static void call_for_help(struct fuse_threads *threads)
{
	unsigned resting = __atomic_load_n(&threads->resting, __ATOMIC_SEQ_CST);

	while (resting && !__atomic_compare_exchange_n(&threads->resting, &resting, resting - 1,
						       false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
		;
	if (resting)
		sem_post(&threads->calls);
}

/* Checks for waiting requests before one is served. */
static void look_for_more(struct fuse_queue *queue, size_t bytes)
{
	struct pollfd connection = { .fd = queue->device_fd, .events = POLLIN };

	queue->unseen += bytes;
	if (queue->unseen < LOOK_BYTES ||
	    !__atomic_load_n(&queue->threads->resting, __ATOMIC_RELAXED))
		return;
	queue->unseen = 0;
	if (poll(&connection, 1, 0) > 0 && connection.revents & POLLIN)
		call_for_help(queue->threads);
}

void fuse_queue_submit(fuse_req_t request, enum io_op op, uint64_t offset, size_t length, bool flag)
{
	struct fuse_queue *queue = own_queue;
	struct fuse_tag *tag = queue->current;
	struct io *io = &tag->io;
	int err = check_range(queue, op, offset, length);

	if (err) {
		worker_count_refusal(queue->worker);
		fuse_reply_err(request, -err);
		return;
	}
	look_for_more(queue, length);
	queue->current = NULL;
	queue->running++;
	tag->request = request;
	*io = (struct io){
		.op = op,
		.fua = op == IO_OP_WRITE && flag,
		.no_unmap = op == IO_OP_WRITE_ZEROES && flag,
		.length = (uint32_t)length,
		.offset = offset,
		.data = tag->record->data,
		.uniform = io->uniform,
	};
	if (tag->record->executed) {
		io->result = tag->record->result;
		io_done(io);
	} else {
		engine_submit(queue->worker, io);
	}
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
		err = io_uring_queue_init(queue->journal->depth, &queue->ring, flag_sets[i]);
	if (err)
		return err;
	queue->ring_ready = true;
	queue->worker->ring = &queue->ring;
	queue->worker->io_done = io_done;
	queue->worker->reply = reply_anywhere;
	queue->worker->io_back = io_back;
	if (!engine->file_count)
		return 0;
	return io_uring_register_files(&queue->ring, engine->files, engine->file_count);
}

/*
 * Gives each tag a record. The first tags get those in which the previous server has left a
 * request; the others are emptied. Returns how many had a request.
 */
static unsigned assign_records(struct fuse_queue *queue)
{
	unsigned left = 0, last = queue->journal->depth;

	for (unsigned i = 0; i < queue->journal->depth; i++) {
		struct fuse_record *record = fuse_record_at(&queue->records, i);
		bool has_header = fuse_record_has_header(&queue->records, record);
		bool is_left = has_header && fuse_record_is_left(queue->journal, record);
		struct fuse_tag *tag = &queue->tags[is_left ? left++ : --last];

		tag->queue = queue;
		tag->record = record;
		/* NB: even without a header, its data may have pages. */
		if (!is_left)
			fuse_record_empty(&queue->records, record);
	}
	return left;
}

static int allocate_tags(struct fuse_queue *queue)
{
	const struct fuse_journal *journal = queue->journal;
	int err;

	queue->records =
		(struct fuse_records){ .journal = journal, .queue = (unsigned)queue->index };
	err = fuse_records_map(&queue->records);
	if (err)
		return err;
	queue->tags = calloc(journal->depth, sizeof(*queue->tags));
	if (!queue->tags)
		return -ENOMEM;
	queue->filled = assign_records(queue);
	for (unsigned i = 0; i < queue->filled && !err; i++)
		err = fuse_record_fill(&queue->records, queue->tags[i].record);
	for (; queue->filled < FUSE_KEPT_RECORDS && !err; queue->filled++) {
		err = fuse_record_fill(&queue->records, queue->tags[queue->filled].record);
		free_tag(&queue->tags[queue->filled]);
	}
	return err;
}

/* Takes the record that the allocator has filled, if it has. */
static void take_filled(struct fuse_queue *queue)
{
	eventfd_t unused;

	if (__atomic_load_n(&queue->need, __ATOMIC_ACQUIRE) != FUSE_NEED_MET)
		return;
	eventfd_read(queue->filled_fd, &unused);
	free_tag(&queue->tags[queue->filled]);
	relaxed_store(&queue->filled, queue->filled + 1);
	relaxed_store(&queue->need, FUSE_NEED_NOTHING);
}

/* Returns whether there is a free tag whose record has its pages. If not, asks for one. */
static bool has_free_tag(struct fuse_queue *queue)
{
	take_filled(queue);
	if (queue->free_tags)
		return true;
	if (relaxed_load(&queue->need) == FUSE_NEED_NOTHING &&
	    queue->filled < queue->journal->depth) {
		queue->wanted = queue->tags[queue->filled].record;
		__atomic_store_n(&queue->need, FUSE_NEED_RECORD, __ATOMIC_RELEASE);
		eventfd_write(queue->allocator_fd, 1);
	}
	return false;
}

/* The allocator says that the queue is idle, so all filled records belong to free tags. */
static void give_records_back(struct fuse_queue *queue)
{
	if (!relaxed_load(&queue->give_back))
		return;
	relaxed_store(&queue->give_back, false);
	worker_take_back(queue->worker);
	take_filled(queue);
	if (queue->running || relaxed_load(&queue->need) != FUSE_NEED_NOTHING)
		return;
	while (queue->filled > FUSE_KEPT_RECORDS) {
		struct fuse_tag *tag = &queue->tags[queue->filled - 1];

		relaxed_store(&queue->filled, queue->filled - 1);
		fuse_record_empty(&queue->records, tag->record);
		tag->io.uniform = (struct uniform){};
	}
	queue->free_tags = NULL;
	for (unsigned i = 0; i < queue->filled; i++)
		free_tag(&queue->tags[i]);
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
	reply_fd = queue->device_fd;
	if (!err)
		err = allocate_tags(queue);
	/* The previous server may have left it in the other mode. */
	queue->blocking = false;
	if (!err)
		err = set_blocking(queue, true);
	return err ?: init_ring(queue);
}

/*
 * Other threads still use the tags that are lent. There are some only after a failure, after which
 * the process ends, or fails all reads.
 */
static void wait_for_lent(struct fuse_queue *queue)
{
	worker_take_back(queue->worker);
	while (queue->worker->lent) {
		poll(NULL, 0, LENT_LOOK_MS);
		worker_take_back(queue->worker);
	}
}

static void queue_deinit(void *owner)
{
	struct fuse_queue *queue = owner;

	wait_for_lent(queue);
	if (queue->ring_ready)
		io_uring_queue_exit(&queue->ring);
	queue->worker->ring = NULL;
	fuse_records_unmap(&queue->records);
	free(queue->tags);
}

static void handle_completions(struct fuse_queue *queue)
{
	struct io_uring_cqe *cqe;

	/* Handle one at a time: an answer may need an SQE, whose completion arrives here too. */
	while (!io_uring_peek_cqe(&queue->ring, &cqe)) {
		struct io *io = io_uring_cqe_get_data(cqe);
		int result = cqe->res;

		io_uring_cqe_seen(&queue->ring, cqe);
		engine_complete(io, result);
	}
	worker_end_round(queue->worker);
}

/* Submits what the engine has prepared; most of it completes at once. */
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

/*
 * Waits until the ring, or the connection if a request may be received, has something. Tags that are
 * lent are waited for where the thread lacks some, or is to end when all are back.
 */
static int wait_for_either(struct fuse_queue *queue)
{
	enum fuse_phase phase = phase_of(queue);
	bool takes = phase != FUSE_LEAVE, may_take = takes && queue->free_tags;
	struct pollfd fds[] = {
		{ .fd = queue->ring.ring_fd, .events = POLLIN },
		{ .fd = may_take ? queue->device_fd : -1, .events = POLLIN },
		{ .fd = takes ? queue->filled_fd : -1, .events = POLLIN },
	};

	if (queue->worker->lent && (phase != FUSE_SERVE || !may_take)) {
		if (worker_await_back(queue->worker))
			return 0;
		io_uring_submit(&queue->ring);
	}
	if (poll(fds, 3, -1) < 0)
		return errno == EINTR ? 0 : -errno;
	handle_completions(queue);
	return 0;
}

/*
 * Called when the thread has nothing to do. The first time, it only counts itself as resting: the
 * receiver of an earlier request may have found no thread to call, so check once more.
 */
static void rest(struct fuse_queue *queue)
{
	if (!queue->resting) {
		queue->resting = true;
		__atomic_add_fetch(&queue->threads->resting, 1, __ATOMIC_SEQ_CST);
		return;
	}
	while (sem_wait(&queue->threads->calls) && phase_of(queue) == FUSE_SERVE)
		give_records_back(queue);
	queue->resting = false;
}

/* It has found something to do before it went to sleep. */
static void end_rest(struct fuse_queue *queue)
{
	struct fuse_threads *threads = queue->threads;
	unsigned resting = __atomic_load_n(&threads->resting, __ATOMIC_SEQ_CST);

	queue->resting = false;
	while (resting && !__atomic_compare_exchange_n(&threads->resting, &resting, resting - 1,
						       false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
		;
	/* All threads have been called, so one of these calls was for this thread. */
	while (!resting && sem_wait(&threads->calls) && phase_of(queue) == FUSE_SERVE)
		;
}

/* Whether this thread is the leader, or becomes it now. */
static bool lead(struct fuse_queue *queue)
{
	int leader = __atomic_load_n(&queue->threads->leader, __ATOMIC_SEQ_CST);

	if (leader == FUSE_NO_LEADER &&
	    __atomic_compare_exchange_n(&queue->threads->leader, &leader, queue->index, false,
					__ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
		leader = queue->index;
	return leader == queue->index;
}

/*
 * Gives up being the leader when it can take no more requests, so that another thread waits for
 * them.
 */
static void step_down(struct fuse_queue *queue)
{
	int leader = queue->index;

	if (__atomic_compare_exchange_n(&queue->threads->leader, &leader, FUSE_NO_LEADER, false,
					__ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
		call_for_help(queue->threads);
}

/* Serves a request that the kernel has just delivered, or had delivered to the previous server. */
static void serve_request(struct fuse_queue *queue, struct fuse_tag *tag)
{
	struct fuse_record *record = tag->record;
	const struct fuse_buf request = { .mem = &record->header, .size = record->header.len };

	if (request.size > FUSE_REQUEST_BYTES)
		tag->io.uniform = (struct uniform){};
	queue->current = tag;
	fuse_session_process_buf(queue->session, &request);
	if (queue->current) { /* it has been answered, or needs no answer */
		fuse_record_clear(record);
		free_tag(tag);
	}
	worker_end_round(queue->worker);
}

static int serve_what_was_left(struct fuse_queue *queue)
{
	int err = 0;

	for (unsigned i = 0; i < queue->filled && !err; i++) {
		struct fuse_tag *tag = &queue->tags[i];

		if (!fuse_record_is_left(queue->journal, tag->record))
			continue;
		serve_request(queue, tag);
		err = settle(queue);
	}
	return err;
}

/*
 * Receives one request and serves it. The leader waits in read(2), which is cheapest, while it has
 * nothing in flight, or only what other threads answer. Otherwise a thread must not wait there, as
 * another one may take the request that poll(2) has announced. Returns false when the thread shall
 * end, and sets `error`.
 */
static bool receive(struct fuse_queue *queue, enum fuse_phase phase, int *error)
{
	struct fuse_tag *tag = queue->free_tags;
	struct fuse_buf buffer = { .mem = &tag->record->header };
	bool leads = phase == FUSE_SERVE && lead(queue);
	int err = set_blocking(queue, leads && !is_busy(queue));

	if (leads && queue->resting)
		end_rest(queue);
	if (!err)
		err = fuse_session_receive_buf(queue->session, &buffer);
	if (err > 0) {
		if (queue->resting)
			end_rest(queue);
		queue->free_tags = tag->next_free;
		worker_take_back(queue->worker);
		relaxed_store(&queue->received, queue->received + 1);
		serve_request(queue, tag);
		return true;
	}
	if (err == -EINTR)
		return true;
	*error = err == -EAGAIN ? 0 :
				  (err ?: -ENOTCONN); /* 0: the kernel has ended the connection */
	if (err != -EAGAIN) {
		fuse_record_clear(
			tag->record); /* from a request that the kernel failed to deliver */
		return false;
	}
	if (phase == FUSE_SERVE && !leads && !is_busy(queue))
		rest(queue);
	return phase == FUSE_SERVE || queue->running;
}

/* Whether it must not wait where it receives requests; see receive(). */
static bool needs_to_wait(struct fuse_queue *queue, enum fuse_phase phase)
{
	if (!queue->running)
		return false;
	return is_busy(queue) || phase != FUSE_SERVE || !has_free_tag(queue);
}

static int queue_serve(void *owner)
{
	struct fuse_queue *queue = owner;
	int left = serve_what_was_left(queue);

	if (left)
		return left;
	for (;;) {
		enum fuse_phase phase = phase_of(queue);
		int err = settle(queue);

		worker_take_back(queue->worker);
		give_records_back(queue);
		if (!err && needs_to_wait(queue, phase)) {
			if (!has_free_tag(queue))
				step_down(queue);
			err = wait_for_either(queue);
		}
		if (err || (phase == FUSE_LEAVE && !queue->running))
			return err;
		if (phase == FUSE_LEAVE || !has_free_tag(queue))
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
