/* SPDX-License-Identifier: MIT */
#include "server/engine.h"

#include <errno.h>
#include <liburing.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/message.h"
#include "server/mail.h"
#include "server/segment.h"

static bool segment_holds(const struct segment *segment, uint64_t offset)
{
	return offset - segment->offset < segment->length;
}

/* `offset` lies in the device, and segments have no gaps, so there is always one. */
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

/* A flush visits every segment that can have something to flush; `done` counts segments. */
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

/* Returns false when nothing is left to do. */
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
 * Reads of uniform segments mostly find that the tag's buffer holds what they want, since nobody has
 * written to it: this is what filling 4 KiB costs saved, which is 2 % of a small read's work.
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
static bool finish_part(struct io *io, int result)
{
	if (io->detached && io->op == IO_OP_READ && !io->part.in_place && result >= 0)
		result = io->worker->copy(io, io->done, io->part.length);
	account_part(io->worker->account, io->segment->kind, io->op, io->part.length, result,
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
	account_answer(io->worker->account);
	io->worker->io_done(io);
}

static void run(struct io *io)
{
	while (next_part(io)) {
		int result;

		io->started_ns = account_start_ns(io->worker->account, !io->segment->ops->complete);
		result = start_part(io);
		if (result == PART_PENDING)
			return;
		if (!finish_part(io, result))
			break;
	}
	answer(io);
}

static void refuse(struct io *io, int err)
{
	account_refusal(io->worker->account);
	io->result = err;
	answer(io);
}

void engine_submit(struct worker *worker, struct io *io)
{
	const struct engine *engine = worker->engine;

	io->worker = worker;
	io->result = 0;
	io->done = 0;
	account_request(worker->account);
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

void engine_part_done(struct io *io, int result)
{
	if (finish_part(io, result))
		run(io);
	else
		answer(io);
}

void engine_complete(struct io *io, int cqe_result)
{
	int result = io->segment->ops->complete(io->segment, io, cqe_result);

	if (result != PART_PENDING)
		engine_part_done(io, result);
}

struct io_uring_sqe *worker_get_sqe(struct worker *worker)
{
	struct io_uring_sqe *sqe = io_uring_get_sqe(worker->ring);

	/* The ring has room for one SQE per tag, but those of this round may not be out yet. */
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
	return 0;
}

static void worker_deinit(struct worker *worker)
{
	account_free(worker->account);
	worker_close_mailbox(worker);
}

void engine_close(struct engine *engine)
{
	for (unsigned i = 0; i < engine->segment_count; i++) {
		struct segment *segment = &engine->segments[i];

		/* Without its private part it was refused before it was parsed. */
		if (segment->ops->close && segment->private)
			segment->ops->close(segment);
		free(segment->private);
	}
	for (unsigned i = 0; i < engine->file_count; i++)
		close(engine->files[i]);
	for (unsigned i = 0; i < engine->worker_count; i++)
		worker_deinit(&engine->workers[i]);
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
	worker->account = account_new(worker->engine->kind_count);
	if (!worker->account)
		return -ENOMEM;
	return worker->engine->wants_mail ? worker_open_mailbox(worker) : 0;
}

void worker_count_refusal(struct worker *worker)
{
	account_refusal(worker->account);
}

void worker_end_round(struct worker *worker)
{
	account_end_round(worker->account);
}

void engine_count(const struct engine *engine, unsigned kind, struct kind_account *sum)
{
	*sum = (struct kind_account){};
	for (unsigned i = 0; i < engine->worker_count; i++) {
		const struct account *account = engine->workers[i].account;

		/* The kernel may have had use for fewer queues than were asked for. */
		if (account)
			account_merge(sum, &account->kinds[kind]);
	}
}

uint64_t engine_count_refused(const struct engine *engine)
{
	uint64_t sum = 0;

	for (unsigned i = 0; i < engine->worker_count; i++) {
		const struct account *account = engine->workers[i].account;

		if (account)
			sum += relaxed_load(&account->refused);
	}
	return sum;
}
