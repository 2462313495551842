/* SPDX-License-Identifier: MIT */
/*
 * btrfs-ublk-verify-reads: reads a file or device whose content is known, without a pause, and
 * accounts for every read: right, wrong, failed, or without an answer. A program that kills the
 * device's server meanwhile sends "mark", and is told when reads are answered again.
 */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <linux/fs.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/cleanup.h"
#include "base/message.h"
#include "base/size.h"
#include "bench/options.h"
#include "bench/reads.h"

#define PROGRAM "btrfs-ublk-verify-reads"
static const char help_text[] =
	"Usage: " PROGRAM " [OPTION]... FILE\n"
	"Read random ranges of FILE, of 4 KiB to 1 MiB, and verify every byte: each aligned\n"
	"8 bytes hold their own offset plus a base, little-endian, as in a pattern segment.\n"
	"\n"
	"  --depth N       with O_DIRECT and an io_uring, N reads at once (default: 64)\n"
	"  --mmap N        through mmap(2), in N threads\n"
	"  --base N        what the first 8 bytes hold (default: 0)\n"
	"  --memset BYTE   every byte is this one\n"
	"  --size SIZE     read below this offset only (default: the size of FILE)\n"
	"  --seed N        for the random numbers (default: 1)\n"
	"  --deadline S    a read that takes longer is \"hung\" (default: 30)\n"
	"  --duration S    end after S seconds; without it, at a line or the end of file on\n"
	"                  standard input. The line \"mark\" does not end it: as soon as a read\n"
	"                  that began after it is answered, a \"served\" event is printed.\n"
	"  --help, --version\n"
	"\n"
	"Prints JSON, a line for each event, and at the end a report; times are those of\n"
	"CLOCK_MONOTONIC, in nanoseconds. pause_ns is the longest time without an answer,\n"
	"which began at pause_at_ns.\n"
	"\n"
	"Exit status: 0 all reads were right, 1 not so, or failed to start, 2 wrong usage.\n";

enum {
	MAX_DEPTH = 1024,
	MAX_THREADS = 64,
	CHECK_MS = 100,
};

struct options {
	const char *path;
	uint64_t depth;
	uint64_t threads; /* that read with mmap(2); 0: O_DIRECT */
	uint64_t base;
	uint64_t byte;
	bool memset;
	uint64_t size; /* 0: the file's size */
	uint64_t seed;
	uint64_t deadline_s;
	uint64_t duration_s; /* 0: until standard input says so */
};

static int file_size(int fd, uint64_t *size)
{
	struct stat status;

	if (fstat(fd, &status))
		return -errno;
	*size = (uint64_t)status.st_size;
	if (S_ISBLK(status.st_mode) && ioctl(fd, BLKGETSIZE64, size))
		return -errno;
	return 0;
}

static int open_file(const struct options *options, struct reads *reads)
{
	int flags = O_RDONLY | O_CLOEXEC | (options->threads ? 0 : O_DIRECT);
	int err;

	reads->fd = open(options->path, flags);
	if (reads->fd < 0)
		return msg_fail(EXIT_FAILED, "cannot open %s: %s", options->path, strerror(errno));
	reads->size = options->size;
	err = reads->size ? 0 : file_size(reads->fd, &reads->size);
	if (err)
		return msg_fail(EXIT_FAILED, "size of %s: %s", options->path, strerror(-err));
	reads->size -= reads->size % BLOCK_BYTES;
	if (!reads->size)
		return msg_fail(EXIT_USAGE, "%s has no whole block of %u bytes", options->path,
				BLOCK_BYTES);
	return EXIT_OK;
}

/* Returns false at the end of the file, and for any line but "mark". */
static bool take_command(struct reads *reads)
{
	static char line[64];
	static size_t length;
	ssize_t got = read(STDIN_FILENO, line + length, sizeof(line) - length);
	char *end;

	if (got < 0)
		return errno == EINTR || errno == EAGAIN;
	if (!got)
		return false;
	length += (size_t)got;
	while ((end = memchr(line, '\n', length))) {
		size_t bytes = (size_t)(end + 1 - line);

		if (bytes != strlen("mark\n") || memcmp(line, "mark", strlen("mark")))
			return false;
		reads_mark(reads);
		length -= bytes;
		memmove(line, end + 1, length);
	}
	return length < sizeof(line);
}

static void wait_for_end(const struct options *options, struct reads *reads)
{
	uint64_t end_ns = clock_now_ns() + options->duration_s * NS_PER_S;
	/* NB: poll() ignores a negative descriptor. */
	struct pollfd input = { .fd = options->duration_s ? -1 : STDIN_FILENO, .events = POLLIN };

	while (!options->duration_s || clock_now_ns() < end_ns) {
		int ready = poll(&input, 1, CHECK_MS);

		reads_find_hung(reads);
		if (ready > 0 && !take_command(reads))
			return;
	}
}

static int start(const struct options *options, struct reads *reads, struct reader *readers)
{
	unsigned per_thread = options->threads ? 1 : reads->slot_count;
	pthread_t thread;

	for (unsigned i = 0; i < reads->running; i++) {
		int err;

		readers[i] = (struct reader){
			.reads = reads,
			.slots = &reads->slots[(size_t)i * per_thread],
			.slot_count = per_thread,
		};
		err = pthread_create(&thread, NULL,
				     options->threads ? read_mapped_main : read_direct_main,
				     &readers[i]);
		if (err)
			return msg_fail(EXIT_FAILED, "cannot start thread %u: %s", i,
					strerror(err));
		pthread_detach(thread);
	}
	return EXIT_OK;
}

static int run(const struct options *options)
{
	static struct reader readers[MAX_THREADS];
	static struct slot slots[MAX_DEPTH];
	static struct reads reads = {
		.lock = PTHREAD_MUTEX_INITIALIZER,
		.idle = PTHREAD_COND_INITIALIZER,
	};
	bool complete = true;
	int ret;

	reads.base = options->base;
	reads.byte = options->memset ? (int)options->byte : -1;
	reads.deadline_ns = options->deadline_s * NS_PER_S;
	reads.random = options->seed;
	reads.slots = slots;
	reads.slot_count = (unsigned)(options->threads ? options->threads : options->depth);
	reads.running = options->threads ? reads.slot_count : 1;
	ret = open_file(options, &reads);
	if (!ret)
		ret = start(options, &reads, readers);
	if (ret)
		return ret;
	wait_for_end(options, &reads);
	if (!reads_stop(&reads))
		complete = false; /* threads are stuck in the kernel */
	for (unsigned i = 0; i < MAX_THREADS; i++) {
		if (readers[i].error)
			complete = false;
	}
	if (reads_report(&reads))
		complete = false;
	return complete && reads_are_good(&reads) ? EXIT_OK : EXIT_FAILED;
}

int main(int argc, char **argv)
{
	struct options options = { .depth = 64, .seed = 1, .deadline_s = 30 };
	const struct bench_option table[] = {
		{ "depth", .number = &options.depth, .least = 1, .most = MAX_DEPTH },
		{ "mmap", .number = &options.threads, .least = 1, .most = MAX_THREADS },
		{ "base", .number = &options.base, .most = UINT64_MAX },
		{ "memset", .number = &options.byte, .most = UINT8_MAX, .given = &options.memset },
		{ "size", .number = &options.size, .least = BLOCK_BYTES, .most = INT64_MAX },
		{ "seed", .number = &options.seed, .most = UINT64_MAX },
		{ "deadline", .number = &options.deadline_s, .least = 1, .most = UINT32_MAX },
		{ "duration", .number = &options.duration_s, .least = 1, .most = UINT32_MAX },
		{},
	};
	int status;

	message_init(PROGRAM);
	status = bench_options_parse(argc, argv, help_text, table, &options.path);
	if (status != BENCH_OPTIONS_DONE)
		return status;
	if (!options.path)
		return usage_error("one FILE is needed", NULL);
	status = run(&options);
	fflush(NULL);
	/* NB: not exit(): threads may still wait for their reads. */
	_exit(status);
}
