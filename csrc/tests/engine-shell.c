/* SPDX-License-Identifier: MIT */
/*
 * engine-shell DESCRIPTION: the engine with one worker, driven from standard input, so that tests
 * (and sanitizers) can use it without a ublk driver. Each line is one request:
 *
 *   read OFFSET LENGTH | write OFFSET LENGTH BYTE | fua OFFSET LENGTH BYTE | flush |
 *   discard OFFSET LENGTH | zero OFFSET LENGTH | zero-keep OFFSET LENGTH
 *
 * where "fua" is a write that has to be durable, and "zero-keep" may not free blocks. The answer is
 * a line "ok N" or "error ERRNO"; after "ok N" of a read come N raw bytes. The answer to "stats" is a
 * line with the statistics, and to "asked" a line with the operations on files since the last time,
 * in words such as "write", "write-dsync", "fdatasync", "fallocate-3". A line that begins
 * with "{" is a request to a map. It is handled as on a control connection.
 */
#include <errno.h>
#include <liburing.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include "base/message.h"
#include "server/control_request.h"
#include "server/description.h"
#include "server/engine.h"
#include "server/stats.h"

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(start, size) ((void)(start), (void)(size))
#define ASAN_UNPOISON_MEMORY_REGION(start, size) ((void)(start), (void)(size))
#endif

enum { LINE_BYTES = 1 << 16 };

static bool finished;
static size_t buffer_bytes; /* of io->data */
static char asked[4096];

static void note(const char *word, int number)
{
	size_t used = strlen(asked);

	snprintf(asked + used, sizeof(asked) - used, "%s%s", used ? " " : "", word);
	used = strlen(asked);
	if (number)
		snprintf(asked + used, sizeof(asked) - used, "-%d", number);
}

/*
 * In the place of libc's, which is what segments in memory call. The system call has the offset in
 * two halves; the high one counts on 32-bit machines only.
 */
ssize_t pwritev2(int fd, const struct iovec *parts, int count, off_t offset, int flags)
{
	note(flags & RWF_DSYNC ? "write-dsync" : "write", 0);
	return syscall(SYS_pwritev2, fd, parts, count, (long)offset, 0L, flags);
}

/* Notes the operations that the next submit sends to the kernel. */
static void note_sqes(const struct io_uring *ring)
{
	const struct io_uring_sq *queue = &ring->sq;

	for (unsigned i = queue->sqe_head; i != queue->sqe_tail; i++) {
		const struct io_uring_sqe *sqe = &queue->sqes[i & *queue->kring_mask];
		bool dsync = (uint32_t)sqe->rw_flags & RWF_DSYNC;

		if (sqe->opcode == IORING_OP_READ)
			note("read", 0);
		else if (sqe->opcode == IORING_OP_WRITE)
			note(dsync ? "write-dsync" : "write", 0);
		else if (sqe->opcode == IORING_OP_FSYNC)
			note(sqe->fsync_flags & IORING_FSYNC_DATASYNC ? "fdatasync" : "fsync", 0);
		else if (sqe->opcode == IORING_OP_FALLOCATE)
			note("fallocate", (int)sqe->len); /* its mode; the length is in addr */
		else
			note("opcode", sqe->opcode);
	}
}

static void io_done(struct io *io)
{
	(void)io;
	finished = true;
}

/* In the place of a front end that sends answers from any thread. */
static void reply(struct io *io, const uint8_t *data)
{
	if (!io->result && data != io->data)
		memcpy(io->data, data, io->length);
}

/* Returns false when the line is not a request. */
static bool parse_request(const char *line, struct io *io, int *byte)
{
	unsigned long long offset = 0, length = 0;
	char word[16];
	int fields = sscanf(line, "%15s %llu %llu %d", word, &offset, &length, byte);

	*io = (struct io){
		.offset = offset,
		.length = (uint32_t)length,
		.data = io->data,
		.uniform = io->uniform,
	};
	if (fields == 3 && !strcmp(word, "read"))
		io->op = IO_OP_READ;
	else if (fields == 4 && (!strcmp(word, "write") || !strcmp(word, "fua")))
		io->op = IO_OP_WRITE;
	else if (fields == 1 && !strcmp(word, "flush"))
		io->op = IO_OP_FLUSH;
	else if (fields == 3 && !strcmp(word, "discard"))
		io->op = IO_OP_DISCARD;
	else if (fields == 3 && (!strcmp(word, "zero") || !strcmp(word, "zero-keep")))
		io->op = IO_OP_WRITE_ZEROES;
	else
		return false;
	io->fua = !strcmp(word, "fua");
	io->no_unmap = !strcmp(word, "zero-keep");
	return true;
}

static int run(struct worker *worker, struct io *io)
{
	finished = false;
	/* By turns as a front end that can do that, and one that cannot. */
	worker->reply = worker->reply ? NULL : reply;
	engine_submit(worker, io);
	worker_end_round(worker);
	while (!finished) {
		struct io_uring_cqe *cqe;
		int err;

		if (worker->lent && worker_await_back(worker))
			continue;
		note_sqes(worker->ring);
		err = io_uring_submit_and_wait(worker->ring, 1);
		if (err < 0)
			return err;
		if (io_uring_peek_cqe(worker->ring, &cqe))
			continue;
		struct io *completed = io_uring_cqe_get_data(cqe);
		int result = cqe->res;

		io_uring_cqe_seen(worker->ring, cqe);
		engine_complete(completed, result);
		worker_end_round(worker);
	}
	return io->result;
}

/*
 * Keeps the buffer of the previous request, as front ends do for each tag. The part beyond the
 * request is poisoned, so that the sanitizer detects accesses to it.
 */
static void prepare_buffer(struct io *io, int byte)
{
	if (buffer_bytes)
		ASAN_UNPOISON_MEMORY_REGION(io->data, buffer_bytes);
	if (io->length > buffer_bytes) {
		free(io->data);
		buffer_bytes = io->length;
		io->data = malloc(buffer_bytes);
		if (!io->data)
			abort();
		io->uniform = (struct uniform){};
	}
	if (!io->data)
		return; /* no request with data so far */
	if (io->op == IO_OP_WRITE) {
		memset(io->data, byte, io->length);
		io->uniform = (struct uniform){};
	} else {
		/* The engine must overwrite all data that it does not know. */
		memset(io->data + io->uniform.length, 0xee, buffer_bytes - io->uniform.length);
	}
	ASAN_POISON_MEMORY_REGION(io->data + io->length, buffer_bytes - io->length);
}

static void answer(struct worker *worker, struct io *io, int byte)
{
	int result;

	prepare_buffer(io, byte);
	result = run(worker, io);
	if (result < 0) {
		printf("error %d\n", -result);
	} else {
		printf("ok %u\n", io->length);
		if (io->op == IO_OP_READ)
			fwrite(io->data, 1, io->length, stdout);
	}
	fflush(stdout);
}

static void print_line(json_t *json)
{
	json_dumpf(json, stdout, JSON_COMPACT);
	json_decref(json);
	putchar('\n');
	fflush(stdout);
}

/* Returns 0 or -EINVAL. */
static int answer_control(const char *line)
{
	struct control_call call = { .message = json_loads(line, 0, NULL), .fd = -1 };
	json_t *reply = NULL;
	const struct control_kind *kind = control_kind_of(call.message, &reply);

	if (kind && kind->work)
		reply = kind->work(&call);
	json_decref(call.message);
	if (!reply)
		return -EINVAL;
	print_line(reply);
	return 0;
}

int main(int argc, char **argv)
{
	struct io_uring ring;
	struct engine engine;
	struct worker *worker;
	struct io io = {};
	static char line[LINE_BYTES];
	FILE *file;
	int err;

	message_init("engine-shell");
	if (argc != 2 || !(file = fopen(argv[1], "re"))) {
		msg_error("usage: engine-shell DESCRIPTION");
		return EXIT_USAGE;
	}
	err = description_load(file, argv[1], &engine);
	fclose(file);
	if (err)
		return EXIT_USAGE;
	err = engine_open(&engine, 1);
	if (err) {
		engine_close(&engine);
		return err == -EINVAL ? EXIT_USAGE : EXIT_FAILED;
	}
	worker = &engine.workers[0];
	worker->ring = &ring;
	worker->io_done = io_done;
	worker->io_back = io_done;
	err = worker_prepare(worker);
	if (!err)
		err = io_uring_queue_init(8, &ring, 0);
	if (!err && engine.file_count)
		err = io_uring_register_files(&ring, engine.files, engine.file_count);
	while (!err && fgets(line, sizeof(line), stdin)) {
		int byte;

		if (!strcmp(line, "stats\n")) {
			print_line(stats_json(&engine));
			continue;
		}
		if (line[0] == '{') {
			err = answer_control(line);
			if (err)
				msg_error("not a request to a map: %s", line);
			continue;
		}
		if (!strcmp(line, "asked\n")) {
			puts(asked);
			asked[0] = 0;
			fflush(stdout);
			continue;
		}
		if (!parse_request(line, &io, &byte)) {
			msg_error("not a request: %s", line);
			err = -EINVAL;
			break;
		}
		answer(worker, &io, byte);
	}
	if (buffer_bytes)
		ASAN_UNPOISON_MEMORY_REGION(io.data, buffer_bytes);
	free(io.data);
	io_uring_queue_exit(&ring);
	engine_close(&engine);
	return err ? EXIT_FAILED : EXIT_OK;
}
