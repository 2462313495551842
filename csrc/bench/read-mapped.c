/* SPDX-License-Identifier: MIT */
/* Reads through mmap(2), one at a time in each thread. Where there are no data, SIGBUS comes. */
#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "base/message.h"
#include "bench/reads.h"

enum { PAGE_BY_PAGE_BYTES = 64 << 10 };

/* What the thread looks at, for the signal's handler. */
static _Thread_local struct {
	const uint8_t *begin, *end;
	const uint8_t *fault; /* the address without data */
	sigjmp_buf escape;
} window;

static void on_sigbus(int signum, siginfo_t *info, void *context)
{
	const uint8_t *address = info->si_addr;

	(void)context;
	if (address < window.begin || address >= window.end) {
		signal(signum, SIG_DFL); /* none of ours: it comes again, and ends us */
		return;
	}
	window.fault = address;
	siglongjmp(window.escape, 1);
}

/* Every page of it, in order; the time when all were there. */
static uint64_t touch(const uint8_t *data, size_t length, size_t page_bytes)
{
	for (size_t at = 0; at < length; at += page_bytes)
		(void)*(const volatile uint8_t *)(data + at);
	return now_ns();
}

/* Returns an errno, ERROR_SIGBUS or 0. `offset`: in the file, where it failed. */
static int look_at(struct reads *reads, const struct slot *slot, const uint8_t *map,
		   uint64_t *end_ns, uint64_t *offset)
{
	const uint8_t *data = map + slot->offset % (uint64_t)getpagesize();

	window.begin = data;
	window.end = data + slot->length;
	if (sigsetjmp(window.escape, 1)) {
		*end_ns = now_ns();
		*offset = slot->offset + (uint64_t)(window.fault - window.begin);
		window.begin = window.end = NULL;
		return ERROR_SIGBUS;
	}
	*end_ns = touch(data, slot->length, (size_t)getpagesize());
	/* NB: pages may have gone again by now. */
	reads_verify(reads, slot->offset, data, slot->length);
	window.begin = window.end = NULL;
	return 0;
}

static bool read_one(struct reads *reads, struct slot *slot)
{
	uint64_t page_bytes = (uint64_t)getpagesize(), end_ns, offset = slot->offset;
	size_t length = slot->length + slot->offset % page_bytes;
	off_t start = (off_t)(slot->offset / page_bytes * page_bytes);
	uint8_t *map = mmap(NULL, length, PROT_READ, MAP_SHARED, reads->fd, start);
	int error;

	if (map == MAP_FAILED) {
		error = errno;
		end_ns = now_ns();
	} else {
		/* Else a fault reads what surrounds it, 4 MiB on btrfs. */
		madvise(map, length, MADV_RANDOM);
		/* Short ones page by page, which would take long ones too long. */
		if (slot->length > PAGE_BY_PAGE_BYTES)
			madvise(map, length, MADV_WILLNEED);
		error = look_at(reads, slot, map, &end_ns, &offset);
		munmap(map, length);
		/* So that the next one here has to be answered as well. */
		posix_fadvise(reads->fd, (off_t)slot->offset, slot->length, POSIX_FADV_DONTNEED);
	}
	reads_end(reads, slot, end_ns, error, offset);
	return !error;
}

void *read_mapped_main(void *argument)
{
	struct reader *reader = argument;
	struct sigaction action = { .sa_sigaction = on_sigbus, .sa_flags = SA_SIGINFO };

	sigaction(SIGBUS, &action, NULL);
	while (reads_begin(reader->reads, reader->slots)) {
		if (!read_one(reader->reads, reader->slots))
			nanosleep(&(struct timespec){ .tv_nsec = 1000000 }, NULL);
	}
	reads_leave(reader->reads);
	return NULL;
}
