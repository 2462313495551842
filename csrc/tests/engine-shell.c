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
 * with "{" is a request over a control connection, and "with FILE" before it passes a descriptor.
 *
 * After "fail KIND NTH LATER", calls fail (failing.h) from the next request on, until "failed",
 * which is answered by how many there were.
 */
#include <errno.h>
#include <fcntl.h>
#include <liburing.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include "base/message.h"
#include "server/control_connection.h"
#include "server/control_pool.h"
#include "server/description.h"
#include "server/engine.h"
#include "server/frontend/frontend.h"
#include "server/stats.h"
#include "tests/failing.h"
#include "tests/passing.h"

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

static struct {
	char kind[24];
	unsigned long nth;
	int later;
} failure;

static void begin_to_fail(void)
{
	if (failure.nth)
		failing_begin(failure.kind, failure.nth, failure.later);
	failure.nth = 0;
}

static int run(struct worker *worker, struct io *io)
{
	finished = false;
	begin_to_fail();
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

/* A control connection, whose other end is `client`. */
static struct control_connection connection;
static struct control_pool *pool;
static int client, file_to_pass = -1;

static int open_control(void)
{
	int ends[2], err = control_pool_start(&pool);

	if (err)
		return err;
	if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends))
		return -errno;
	client = ends[1];
	return control_init(&connection, ends[0], pool, CONTROL_OWNER_WAIT_MS);
}

static int close_control(void)
{
	control_deinit(&connection);
	close(client);
	return control_pool_stop(pool);
}

static int ask(const char *line)
{
	const ssize_t length = (ssize_t)strlen(line);

	if (send_with_file(client, line, (size_t)length, file_to_pass) != length)
		return -EIO;
	if (file_to_pass >= 0)
		close(file_to_pass);
	file_to_pass = -1;
	return 0;
}

/* Does what a server does, until there is an answer. */
static int serve(const struct control_subject *subject)
{
	for (;;) {
		struct pollfd fds[] = {
			{ .fd = client, .events = POLLIN },
			{ .fd = connection.fd, .events = connection.job ? 0 : POLLIN },
			{ .fd = control_pool_fd(pool), .events = POLLIN },
		};
		enum control_action action = CONTROL_GO_ON;

		if (poll(fds, 3, -1) < 0)
			return -errno;
		if (fds[0].revents)
			return 0;
		if (fds[1].revents)
			action = control_receive(&connection, subject);
		else if (control_pool_take(pool))
			action = control_finish(&connection, subject);
		if (action == CONTROL_GONE || connection.broken)
			return -EPIPE;
	}
}

static int print_answer(void)
{
	static char text[LINE_BYTES];
	ssize_t got;

	do {
		got = recv(client, text, sizeof(text), 0);
		if (got <= 0)
			return -EIO;
		fwrite(text, 1, (size_t)got, stdout);
	} while (text[got - 1] != '\n');
	fflush(stdout);
	return 0;
}

/* Returns 0, or a negative errno when a server would give the connection up. */
static int answer_control(struct engine *engine, const char *line)
{
	static const struct frontend_ops ops = { .name = "none" };
	struct frontend frontend = { .ops = &ops, .engine = engine };
	struct control_subject subject = {
		.frontend = &frontend,
		.ready = json_pack("{s:s}", "event", "ready"),
	};
	int err = ask(line);

	begin_to_fail();
	if (!err)
		err = serve(&subject);
	json_decref(subject.ready);
	return err ?: print_answer();
}

/* Returns whether the line is about the requests to come. */
static bool prepare(const char *line)
{
	char path[256];

	if (sscanf(line, "fail %23s %lu %d", failure.kind, &failure.nth, &failure.later) == 3)
		return true;
	if (sscanf(line, "with %255s", path) != 1)
		return false;
	file_to_pass = open(path, O_RDWR | O_CLOEXEC);
	return file_to_pass >= 0;
}

static int failed(int err)
{
	msg_error("cannot serve: %s", strerror(-err));
	return err == -EINVAL ? EXIT_USAGE : EXIT_FAILED;
}

int main(int argc, char **argv)
{
	struct io_uring ring;
	struct engine engine;
	struct worker *worker;
	struct io io = {};
	static char line[LINE_BYTES];
	bool talks = false;
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
		return failed(err);
	err = engine_open(&engine, 1);
	if (err) {
		engine_close(&engine);
		return failed(err);
	}
	worker = &engine.workers[0];
	worker->ring = &ring;
	worker->io_done = io_done;
	worker->io_back = io_done;
	err = worker_prepare(worker);
	if (!err) {
		err = open_control();
		talks = !err;
	}
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
		if (!strcmp(line, "failed\n")) {
			printf("%lu\n", failing_end());
			fflush(stdout);
			continue;
		}
		if (prepare(line))
			continue;
		if (line[0] == '{') {
			err = answer_control(&engine, line);
			if (err)
				msg_error("no answer to %s", line);
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
	if (talks)
		err = close_control() ?: err;
	engine_close(&engine);
	return err ? failed(err) : EXIT_OK;
}
