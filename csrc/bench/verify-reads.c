/* SPDX-License-Identifier: MIT */
/*
 * btrfs-ublk-verify-reads: load that notices a dead server. Each thread is one read under way, and
 * the main thread looks for reads that hang.
 */
#include <endian.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <linux/fs.h>
#include <poll.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/message.h"
#include "base/size.h"

#define PROGRAM "btrfs-ublk-verify-reads"

static const char help_text[] =
	"Usage: " PROGRAM " direct|mmap THREADS BASE SEED DEADLINE_S FILE\n"
	"Read random ranges of FILE, of 4 KiB to 1 MiB, with O_DIRECT or through mmap(2), and\n"
	"verify every byte: each aligned 8 bytes hold their own offset plus BASE,\n"
	"little-endian, as in a pattern segment. A read that takes longer than DEADLINE_S is\n"
	"\"hung\". The line \"mark\" on standard input asks for a \"served\" event as soon as a\n"
	"read that began after it is answered; another line, or the end of the file, ends it.\n"
	"Prints JSON, a line for each event, and at the end a report; times are those of\n"
	"CLOCK_MONOTONIC, in nanoseconds.\n"
	"Exit status: 0 all reads were right, 1 not so, or failed to start, 2 wrong usage.\n";

enum {
	READ_LOG_BLOCKS = 8, /* the longest read is 2^8 blocks, 1 MiB */
	READ_MAX_BYTES = BLOCK_BYTES << READ_LOG_BLOCKS,
	LARGEST_FOLIO_BYTES = 2 << 20,
	PAGE_BY_PAGE_BYTES = 64 << 10,
	MAX_THREADS = 256,
	CHECK_MS = 100,
	SECTOR_BYTES = 512,
	/* Used instead of an errno. */
	ERROR_SHORT = 254, /* the file ended */
	ERROR_SIGBUS = 255,
	ERRORS = 256,
};

/* A thread, and its read under way. */
struct slot {
	uint64_t offset;
	uint64_t begin_ns; /* 0: no read */
	size_t length;
	bool hung; /* it was reported */
};

static bool is_mapped;
static int fd;
static uint64_t file_bytes, base, random_state, deadline_ns;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct slot slots[MAX_THREADS];
static unsigned slot_count, running;
static bool stopping;
static uint64_t mark_ns, marks; /* mark_ns: when "mark" was read; 0: "served" was said */
static uint64_t reads, errors, hung, wrong_bytes, max_ns;
static uint64_t by_error[ERRORS];
static uint64_t wrong_offset, wrong_found; /* of the first wrong word */

/* The memory that the thread is reading, for the signal handler. */
static _Thread_local const uint8_t *window_begin, *window_end;
static _Thread_local sigjmp_buf escape;

/* splitmix64 (Steele, Lea, Flood 2014): any seed will do, and all 64 bits are good. */
static uint64_t next_random(void)
{
	uint64_t z = random_state += 0x9e3779b97f4a7c15;

	z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
	z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
	return z ^ (z >> 31);
}

/* Chooses what to read; false: nothing more. */
static bool begin(struct slot *slot)
{
	pthread_mutex_lock(&lock);
	slot->length = (size_t)BLOCK_BYTES << next_random() % (READ_LOG_BLOCKS + 1);
	if (slot->length > file_bytes)
		slot->length = file_bytes;
	slot->offset =
		next_random() % ((file_bytes - slot->length) / BLOCK_BYTES + 1) * BLOCK_BYTES;
	slot->hung = false;
	slot->begin_ns = stopping ? 0 : clock_now_ns();
	running -= stopping;
	pthread_mutex_unlock(&lock);
	return slot->begin_ns;
}

static void end(struct slot *slot, uint64_t end_ns, int error)
{
	pthread_mutex_lock(&lock);
	if (error) {
		by_error[error < ERRORS ? error : EIO]++;
		errors++;
	} else {
		reads++;
		if (end_ns - slot->begin_ns > max_ns)
			max_ns = end_ns - slot->begin_ns;
		if (mark_ns && slot->begin_ns >= mark_ns) {
			mark_ns = 0;
			printf("{\"event\": \"served\", \"mark\": %" PRIu64 ", \"at_ns\": %" PRIu64
			       "}\n",
			       marks, end_ns);
		}
	}
	slot->begin_ns = 0;
	pthread_mutex_unlock(&lock);
	if (error) /* a removed device fails a million reads per second */
		poll(NULL, 0, 1);
}

static void verify(uint64_t offset, const uint8_t *data, size_t length)
{
	for (size_t at = 0; at < length; at += sizeof(uint64_t)) {
		uint64_t found, difference;

		memcpy(&found, data + at, sizeof(found));
		difference = le64toh(found) ^ (base + offset + at);
		if (!difference)
			continue;
		pthread_mutex_lock(&lock);
		if (!wrong_bytes) {
			wrong_offset = offset + at;
			wrong_found = le64toh(found);
		}
		for (; difference; difference >>= 8)
			wrong_bytes += (difference & 0xff) != 0;
		pthread_mutex_unlock(&lock);
	}
}

static void read_direct(struct slot *slot, uint8_t *buffer)
{
	size_t done = 0;
	int error = 0;

	/* A wrong word in each sector, to detect a read that succeeds without filling it. */
	for (size_t at = 0; at < slot->length; at += SECTOR_BYTES) {
		uint64_t word = ~htole64(base + slot->offset + at);

		memcpy(buffer + at, &word, sizeof(word));
	}
	while (done < slot->length && !error) {
		ssize_t got =
			pread(fd, buffer + done, slot->length - done, (off_t)(slot->offset + done));

		if (got > 0)
			done += (size_t)got;
		else if (got == 0 || errno != EINTR)
			error = got ? errno : ERROR_SHORT;
		if (done % BLOCK_BYTES)
			error = ERROR_SHORT;
	}
	verify(slot->offset, buffer, done);
	end(slot, clock_now_ns(), error);
}

static void on_sigbus(int signum, siginfo_t *info, void *context)
{
	const uint8_t *address = info->si_addr;

	if (address >= window_begin && address < window_end)
		siglongjmp(escape, 1);
	signal(signum, SIG_DFL); /* not our read: the signal comes again, and is fatal */
}

/* Returns 0 or ERROR_SIGBUS. Pages may be evicted while they are compared. */
static int look_at(const struct slot *slot, const uint8_t *map)
{
	int error = 0;

	window_begin = map + slot->offset % (uint64_t)getpagesize();
	window_end = window_begin + slot->length;
	if (sigsetjmp(escape, 1))
		error = ERROR_SIGBUS;
	else
		verify(slot->offset, window_begin, slot->length);
	window_begin = window_end = NULL;
	return error;
}

static void read_mapped(struct slot *slot)
{
	uint64_t page_bytes = (uint64_t)getpagesize();
	size_t length = slot->length + slot->offset % page_bytes;
	off_t start = (off_t)(slot->offset / page_bytes * page_bytes);
	uint8_t *map = mmap(NULL, length, PROT_READ, MAP_SHARED, fd, start);
	uint64_t first = slot->offset / LARGEST_FOLIO_BYTES * LARGEST_FOLIO_BYTES;
	uint64_t last = round_up_u64(slot->offset + slot->length, LARGEST_FOLIO_BYTES);
	int error = map == MAP_FAILED ? errno : 0;

	if (!error) {
		/* Otherwise a fault reads ahead, 4 MiB on btrfs. */
		madvise(map, length, MADV_RANDOM);
		/* Short reads go page by page, which would be too slow for long ones. */
		if (slot->length > PAGE_BY_PAGE_BYTES)
			madvise(map, length, MADV_WILLNEED);
		error = look_at(slot, map);
		munmap(map, length);
		/* So that the next read asks the device; the kernel keeps a folio in part. */
		posix_fadvise(fd, (off_t)first, (off_t)(last - first), POSIX_FADV_DONTNEED);
	}
	end(slot, clock_now_ns(), error);
}

static void *thread_main(void *argument)
{
	struct slot *slot = argument;
	uint8_t *buffer = is_mapped ? NULL : aligned_alloc(BLOCK_BYTES, READ_MAX_BYTES);

	if (!is_mapped && !buffer)
		_exit(msg_fail(EXIT_FAILED, "no memory"));
	while (begin(slot)) {
		if (is_mapped)
			read_mapped(slot);
		else
			read_direct(slot, buffer);
	}
	free(buffer);
	return NULL;
}

static void find_hung(void)
{
	uint64_t now = clock_now_ns();

	pthread_mutex_lock(&lock);
	for (struct slot *slot = slots; slot < slots + slot_count; slot++) {
		if (!slot->begin_ns || slot->hung || now < slot->begin_ns + deadline_ns)
			continue;
		slot->hung = true;
		hung++;
		printf("{\"event\": \"hung\", \"offset\": %" PRIu64 ", \"length\": %zu}\n",
		       slot->offset, slot->length);
	}
	pthread_mutex_unlock(&lock);
}

static bool is_running(void)
{
	bool found;

	pthread_mutex_lock(&lock);
	found = running;
	pthread_mutex_unlock(&lock);
	return found;
}

/* Waits for lines until one ends it, then for threads, but not for those stuck in the kernel. */
static void wait_for_end(void)
{
	struct pollfd input = { .fd = STDIN_FILENO, .events = POLLIN };
	uint64_t until_ns;
	char line[16];

	for (;;) {
		int ready = poll(&input, 1, CHECK_MS);

		find_hung();
		if (ready > 0 && (!fgets(line, sizeof(line), stdin) || strcmp(line, "mark\n") != 0))
			break;
		pthread_mutex_lock(&lock);
		if (ready > 0) {
			marks++;
			mark_ns = clock_now_ns();
		}
		pthread_mutex_unlock(&lock);
	}
	pthread_mutex_lock(&lock);
	stopping = true;
	pthread_mutex_unlock(&lock);
	until_ns = clock_now_ns() + deadline_ns;
	while (is_running() && clock_now_ns() < until_ns)
		poll(NULL, 0, 1);
	find_hung();
}

static void report(void)
{
	const char *separator = "";

	pthread_mutex_lock(&lock);
	printf("{\"event\": \"report\", \"reads\": %" PRIu64 ", \"errors\": %" PRIu64
	       ", \"hung\": %" PRIu64 ", \"max_ns\": %" PRIu64 ", \"wrong_bytes\": %" PRIu64
	       ", \"wrong_offset\": %" PRIu64 ", \"wrong_found\": %" PRIu64 ", \"by_error\": {",
	       reads, errors, hung, max_ns, wrong_bytes, wrong_offset, wrong_found);
	for (int i = 0; i < ERRORS; i++) {
		const char *name = i == ERROR_SHORT  ? "short" :
				   i == ERROR_SIGBUS ? "SIGBUS" :
						       strerrorname_np(i);

		if (by_error[i])
			printf("%s\"%s\": %" PRIu64, separator, name ? name : "unknown",
			       by_error[i]);
		separator = by_error[i] ? ", " : separator;
	}
	puts("}}");
	pthread_mutex_unlock(&lock);
}

static int open_file(const char *path)
{
	struct stat status;

	fd = open(path, O_RDONLY | O_CLOEXEC | (is_mapped ? 0 : O_DIRECT));
	if (fd < 0 || fstat(fd, &status))
		return -errno;
	file_bytes = (uint64_t)status.st_size;
	if (S_ISBLK(status.st_mode) && ioctl(fd, BLKGETSIZE64, &file_bytes))
		return -errno;
	file_bytes -= file_bytes % BLOCK_BYTES;
	return file_bytes ? 0 : -ENODATA;
}

int main(int argc, char **argv)
{
	struct sigaction action = { .sa_sigaction = on_sigbus, .sa_flags = SA_SIGINFO };
	uint64_t threads, deadline_s;
	int status;

	message_init(PROGRAM);
	if (answer_options(argc, argv, help_text, &status))
		return status;
	is_mapped = argc > 1 && !strcmp(argv[1], "mmap");
	if (argc != 7 || (!is_mapped && strcmp(argv[1], "direct") != 0) ||
	    size_parse(argv[2], &threads) || !threads || threads > MAX_THREADS ||
	    size_parse(argv[3], &base) || size_parse(argv[4], &random_state) ||
	    size_parse(argv[5], &deadline_s) || !deadline_s)
		return usage_error("wrong words", NULL);
	status = open_file(argv[6]);
	if (status)
		return msg_fail(EXIT_FAILED, "cannot read %s: %s", argv[6], strerror(-status));
	setvbuf(stdout, NULL, _IOLBF, 0);
	setvbuf(stdin, NULL, _IONBF, 0); /* poll() does not see what a buffer has */
	sigaction(SIGBUS, &action, NULL);
	deadline_ns = deadline_s * NS_PER_S;
	slot_count = running = (unsigned)threads;
	for (unsigned i = 0; i < slot_count; i++) {
		pthread_t thread;

		status = pthread_create(&thread, NULL, thread_main, &slots[i]);
		if (status)
			return msg_fail(EXIT_FAILED, "cannot start a thread: %s", strerror(status));
		pthread_detach(thread);
	}
	wait_for_end();
	report();
	fflush(NULL);
	/* NB: not exit(): threads may still wait for their reads. */
	_exit(running || wrong_bytes || errors || hung ? EXIT_FAILED : EXIT_OK);
}
