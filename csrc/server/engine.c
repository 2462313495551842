/* SPDX-License-Identifier: MIT */
#include "server/engine.h"

#include <errno.h>
#include <liburing.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "base/list.h"
#include "base/message.h"
#include "server/segment.h"

static bool segment_holds(const struct segment *segment, uint64_t offset)
{
	return offset - segment->offset < segment->length;
}

/* `offset` lies within the device, and segments have no gaps, so there always is one. */
static struct segment *find_segment(struct worker *worker, uint64_t offset)
{
	struct engine *engine = worker->engine;
	unsigned low = 0, high = engine->segment_count;

	if (segment_holds(worker->last_segment, offset))
		return worker->last_segment;
	while (high - low > 1) {
		unsigned middle = low + (high - low) / 2;

		if (engine->segments[middle].offset <= offset)
			low = middle;
		else
			high = middle;
	}
	worker->last_segment = &engine->segments[low];
	return worker->last_segment;
}

/* A flush visits all segments that may have something to flush; `done` counts segments. */
static bool next_flush_part(struct io *io)
{
	struct engine *engine = io->worker->engine;

	for (; io->done < engine->segment_count; io->done++) {
		struct segment *segment = &engine->segments[io->done];

		if (!segment->ops->flush)
			continue;
		io->segment = segment;
		io->part = (struct part){};
		return true;
	}
	return false;
}

/* Returns false when no part is left. */
static bool next_part(struct io *io)
{
	uint64_t offset = io->offset + io->done;
	struct segment *segment;
	uint64_t room;

	if (io->op == IO_OP_FLUSH)
		return next_flush_part(io);
	if (io->done == io->length)
		return false;
	segment = find_segment(io->worker, offset);
	room = segment->offset + segment->length - offset;
	io->segment = segment;
	io->part.offset = offset - segment->offset;
	io->part.length = io->length - io->done;
	if (io->part.length > room)
		io->part.length = (uint32_t)room;
	io->part.done = 0;
	io->part.in_place = false;
	io->part.private = NULL;
	io->part.data = io->data ? io->data + io->done : NULL;
	return true;
}

/*
 * Reads of uniform segments mostly find that the tag's buffer already has the right bytes. Not
 * filling 4 KiB saves 2 % of the work of a small read.
 */
static int read_uniform(struct io *io, uint8_t byte)
{
	struct uniform *known = &io->uniform;
	uint32_t end = io->done + io->part.length;

	if (known->byte == byte && known->length >= end)
		return 0;
	memset(io->part.data, byte, io->part.length);
	if (io->done == 0 || (known->byte == byte && known->length >= io->done))
		*known = (struct uniform){ .length = end, .byte = byte };
	else if (known->length > io->done)
		known->length = io->done;
	return 0;
}

static int read_part(struct segment *segment, struct io *io)
{
	const struct segment_ops *ops = segment->ops;

	if (ops->uniform_byte)
		return read_uniform(io, ops->uniform_byte(segment));
	if (io->uniform.length > io->done)
		io->uniform.length = io->done;
	return ops->read(segment, io);
}

static int start_part(struct io *io)
{
	struct segment *segment = io->segment;
	const struct segment_ops *ops = segment->ops;

	switch (io->op) {
	case IO_OP_READ:
		return read_part(segment, io);
	case IO_OP_WRITE:
		return ops->write ? ops->write(segment, io) : -EROFS;
	case IO_OP_FLUSH:
		return ops->flush(segment, io);
	case IO_OP_DISCARD:
		return ops->discard ? ops->discard(segment, io) : -EOPNOTSUPP;
	case IO_OP_WRITE_ZEROES:
		return ops->write_zeroes ? ops->write_zeroes(segment, io) : -EOPNOTSUPP;
	default:
		return -EOPNOTSUPP;
	}
}

int engine_fetch_data(struct io *io)
{
	if (!io->detached || io->part.done)
		return 0;
	io->uniform.length = 0;
	return io->worker->copy(io, io->done, io->part.length);
}

/* Returns false when the request is over. */
static bool finish_part(struct io *io, struct worker_stats *stats, int result)
{
	if (io->detached && io->op == IO_OP_READ && !io->part.in_place && result >= 0)
		result = io->worker->copy(io, io->done, io->part.length);
	worker_stats_part(stats, io->segment->kind, io->op, io->part.length, result,
			  io->started_ns);
	if (result < 0) {
		io->result = result;
		return false;
	}
	io->done += io->op == IO_OP_FLUSH ? 1 : io->part.length;
	return true;
}

static void answer(struct io *io)
{
	worker_stats_answer(io->worker->stats);
	io->worker->io_done(io);
}

static void run(struct io *io)
{
	while (next_part(io)) {
		int result;

		io->started_ns =
			worker_stats_start_ns(io->worker->stats, !io->segment->ops->complete);
		result = start_part(io);
		if (result == PART_PENDING)
			return;
		if (!finish_part(io, io->worker->stats, result))
			break;
	}
	answer(io);
}

static void refuse(struct io *io, int err)
{
	worker_stats_refusal(io->worker->stats);
	io->result = err;
	answer(io);
}

void engine_submit(struct worker *worker, struct io *io)
{
	const struct engine *engine = worker->engine;

	io->worker = worker;
	io->result = 0;
	io->done = 0;
	worker_stats_request(worker->stats);
	if (io->op != IO_OP_FLUSH &&
	    (io->length > engine->size || io->offset > engine->size - io->length)) {
		refuse(io, -EIO);
		return;
	}
	if (engine->read_only && io->op != IO_OP_READ && io->op != IO_OP_FLUSH) {
		refuse(io, -EROFS);
		return;
	}
	run(io);
}

/* Finishes a part outside of segment_ops.complete, on the io's worker. */
static void part_done(struct io *io, int result)
{
	if (finish_part(io, io->worker->stats, result))
		run(io);
	else
		answer(io);
}

bool engine_lend(struct io *io)
{
	struct worker *worker = io->worker;

	if (!worker->reply || io->op != IO_OP_READ || io->detached ||
	    io->done + io->part.length != io->length)
		return false;
	worker->lent++;
	return true;
}

void engine_take_back(struct io *io)
{
	io->worker->lent--;
}

/* NB: count first: the reader may ask for statistics as soon as it has the answer. */
static void count_elsewhere(struct io *io, int result)
{
	struct engine *engine = io->worker->engine;

	pthread_mutex_lock(&engine->elsewhere_lock);
	finish_part(io, engine->elsewhere, result);
	worker_stats_time_answers(engine->elsewhere);
	pthread_mutex_unlock(&engine->elsewhere_lock);
	worker_stats_answer_elsewhere(io->worker->stats);
}

/*
 * NB: of two exchanges of `wants_back` one is the first. Either the worker finds the message after
 * its own, or it is seen here that it sleeps. All that is touched after the message is the worker,
 * which stays until the segments have been closed.
 */
void engine_answer(struct io *io, int result, const uint8_t *data)
{
	struct worker *worker = io->worker;

	count_elsewhere(io, result);
	worker->reply(io, data ?: io->data);
	message_queue_put(&worker->back, &io->message);
	if (__atomic_exchange_n(&worker->wants_back, false, __ATOMIC_ACQ_REL))
		eventfd_write(worker->messages_fd, 1);
}

void engine_complete(struct io *io, int cqe_result)
{
	int result = io->segment->ops->complete(io->segment, io, cqe_result);

	if (result != PART_PENDING)
		part_done(io, result);
}

struct io_uring_sqe *worker_get_sqe(struct worker *worker)
{
	struct io_uring_sqe *sqe = io_uring_get_sqe(worker->ring);

	/*
	 * The ring has room for one SQE per tag, but SQEs of this round may not be submitted yet.
	 */
	while (!sqe) {
		int err = io_uring_submit(worker->ring);

		if (err < 0 && err != -EINTR && err != -EAGAIN && err != -EBUSY) {
			msg_error("cannot submit I/O: %s", strerror(-err));
			abort();
		}
		sqe = io_uring_get_sqe(worker->ring);
	}
	return sqe;
}

void worker_prepare_file(struct worker *worker, struct io_uring_sqe *sqe, struct io *io,
			 unsigned file)
{
	sqe->fd = (int)(worker->first_file + file);
	sqe->flags |= IOSQE_FIXED_FILE;
	io_uring_sqe_set_data(sqe, io);
}

/*
 * Parts that other threads finish come back through the worker's message queue. An eventfd wakes
 * the worker, which reads it through its ring: so it waits for such answers as for any other I/O,
 * and front ends, and devices without such parts, need not care.
 */
static void arm(struct worker *worker)
{
	struct io_uring_sqe *sqe = worker_get_sqe(worker);

	io_uring_prep_read(sqe, worker->messages_fd, &worker->messages_count,
			   sizeof(worker->messages_count), 0);
	io_uring_sqe_set_data(sqe, &worker->messages_io);
	worker->messages_armed = true;
}

bool worker_take_back(struct worker *worker)
{
	struct message *message;

	if (!relaxed_load(&worker->back.newest))
		return false;
	message = message_queue_take(&worker->back);
	while (message) {
		struct io *io = container_of(message, struct io, message);

		message = message->next;
		worker->lent--;
		worker_stats_take_answer(worker->stats);
		worker->io_back(io);
	}
	worker_stats_end_round(worker->stats);
	return true;
}

bool worker_await_back(struct worker *worker)
{
	(void)__atomic_exchange_n(&worker->wants_back, true, __ATOMIC_ACQ_REL);
	if (worker_take_back(worker))
		return true;
	if (!worker->messages_armed)
		arm(worker);
	return false;
}

/* Completes that read. The messages are taken whatever its result. */
static int take_messages(struct segment *segment, struct io *messages_io, int cqe_result)
{
	struct worker *worker = container_of(messages_io, struct worker, messages_io);
	struct message *message;

	worker->messages_armed = false;
	message = message_queue_take(&worker->messages);
	while (message) {
		struct io *io = container_of(message, struct io, message);

		/* The io may be answered and reused at once. */
		message = message->next;
		worker->expected--;
		engine_complete(io, io->message_result);
	}
	worker_take_back(worker);
	if (worker->expected && !worker->messages_armed)
		arm(worker);
	return PART_PENDING;
}

static const struct segment_ops messages_ops = {
	.name = "messages",
	.complete = take_messages,
};

/* It belongs to no device; it only receives the completion. */
static struct segment messages_segment = { .ops = &messages_ops };

static int open_message_queue(struct worker *worker)
{
	int fd = eventfd(0, EFD_CLOEXEC);

	if (fd < 0)
		return -errno;
	worker->messages_fd = fd;
	worker->messages_io.segment = &messages_segment;
	worker->messages_io.worker = worker;
	return 0;
}

static void close_message_queue(struct worker *worker)
{
	if (worker->messages_fd)
		close(worker->messages_fd);
	worker->messages_fd = 0;
}

void worker_expect(struct io *io)
{
	struct worker *worker = io->worker;

	worker->expected++;
	if (!worker->messages_armed)
		arm(worker);
}

void worker_expect_no_more(struct io *io)
{
	io->worker->expected--;
}

void worker_answer(struct io *io, int result)
{
	struct worker *worker = io->worker;

	io->message_result = result;
	if (message_queue_put(&worker->messages, &io->message))
		eventfd_write(worker->messages_fd, 1);
}

int engine_add_file(struct engine *engine, int fd)
{
	int *files = realloc(engine->files, (engine->file_count + 1) * sizeof(*files));

	if (!files) {
		close(fd);
		return -ENOMEM;
	}
	engine->files = files;
	files[engine->file_count] = fd;
	return (int)engine->file_count++;
}

int engine_open(struct engine *engine, unsigned worker_count)
{
	engine->workers = calloc(worker_count, sizeof(*engine->workers));
	if (!engine->workers)
		return -ENOMEM;
	engine->worker_count = worker_count;
	for (unsigned i = 0; i < worker_count; i++) {
		struct worker *worker = &engine->workers[i];

		worker->engine = engine;
		worker->last_segment = engine->segments;
	}
	for (unsigned i = 0; i < engine->segment_count; i++) {
		struct segment *segment = &engine->segments[i];
		int err = segment->ops->open ? segment->ops->open(engine, segment) : 0;

		if (err)
			return err;
	}
	if (!engine->wants_messages)
		return 0;
	engine->elsewhere = worker_stats_new(engine->kind_count);
	if (!engine->elsewhere)
		return -ENOMEM;
	pthread_mutex_init(&engine->elsewhere_lock, NULL);
	return 0;
}

static void worker_deinit(struct worker *worker)
{
	worker_stats_free(worker->stats);
	close_message_queue(worker);
}

void engine_close(struct engine *engine)
{
	for (unsigned i = 0; i < engine->segment_count; i++) {
		struct segment *segment = &engine->segments[i];

		/* A segment without private data was refused before it was parsed. */
		if (segment->ops->close && segment->private)
			segment->ops->close(segment);
		free(segment->private);
	}
	for (unsigned i = 0; i < engine->file_count; i++)
		close(engine->files[i]);
	for (unsigned i = 0; i < engine->worker_count; i++)
		worker_deinit(&engine->workers[i]);
	if (engine->elsewhere)
		pthread_mutex_destroy(&engine->elsewhere_lock);
	worker_stats_free(engine->elsewhere);
	free(engine->workers);
	free(engine->files);
	free(engine->segments);
	free(engine->kinds);
	*engine = (struct engine){};
}

bool engine_waits(const struct engine *engine)
{
	for (unsigned i = 0; i < engine->kind_count; i++) {
		if (engine->kinds[i]->waits)
			return true;
	}
	return false;
}

void engine_abandon(struct engine *engine)
{
	for (unsigned i = 0; i < engine->segment_count; i++) {
		struct segment *segment = &engine->segments[i];

		if (segment->ops->abandon)
			segment->ops->abandon(segment);
	}
}

int worker_prepare(struct worker *worker)
{
	worker->stats = worker_stats_new(worker->engine->kind_count);
	if (!worker->stats)
		return -ENOMEM;
	return worker->engine->wants_messages ? open_message_queue(worker) : 0;
}

void worker_count_refusal(struct worker *worker)
{
	worker_stats_refusal(worker->stats);
}

void worker_end_round(struct worker *worker)
{
	worker_stats_end_round(worker->stats);
}

void engine_count(const struct engine *engine, unsigned kind, struct kind_stats *sum)
{
	*sum = (struct kind_stats){};
	for (unsigned i = 0; i < engine->worker_count; i++) {
		const struct worker_stats *stats = engine->workers[i].stats;

		/* The kernel may use fewer queues than were asked for. */
		if (stats)
			worker_stats_merge(sum, &stats->kinds[kind]);
	}
	if (engine->elsewhere)
		worker_stats_merge(sum, &engine->elsewhere->kinds[kind]);
}

uint64_t engine_count_refused(const struct engine *engine)
{
	uint64_t sum = 0;

	for (unsigned i = 0; i < engine->worker_count; i++) {
		const struct worker_stats *stats = engine->workers[i].stats;

		if (stats)
			sum += relaxed_load(&stats->refused);
	}
	return sum;
}
