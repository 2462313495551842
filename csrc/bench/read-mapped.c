/* SPDX-License-Identifier: MIT */
/* Reads through mmap(2), one at a time in each thread. A failed read raises SIGBUS. */
#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "base/message.h"
#include "base/size.h"
#include "bench/reads.h"

enum { PAGE_BY_PAGE_BYTES = 64 << 10, LARGEST_FOLIO_BYTES = 2 << 20 };

/* The memory that the thread is reading, for the signal handler. */
static _Thread_local struct {
	const uint8_t *begin, *end;
	const uint8_t *fault; /* the address whose read failed */
	sigjmp_buf escape;
} window;

static void on_sigbus(int signum, siginfo_t *info, void *context)
{
	const uint8_t *address = info->si_addr;

	if (address < window.begin || address >= window.end) {
		signal(signum, SIG_DFL); /* not our read: the signal comes again, and is fatal */
		return;
	}
	window.fault = address;
	siglongjmp(window.escape, 1);
}

/* Touches every page in order, and returns the time when all had been read. */
static uint64_t touch(const uint8_t *data, size_t length, size_t page_bytes)
{
	for (size_t at = 0; at < length; at += page_bytes)
		(void)*(const volatile uint8_t *)(data + at);
	return clock_now_ns();
}

/* Returns 0, or ERROR_SIGBUS and sets `offset` to the place in the file that failed. */
static int look_at(struct reads *reads, const struct slot *slot, const uint8_t *map,
		   uint64_t *end_ns, uint64_t *offset)
{
	const uint8_t *data = map + slot->offset % (uint64_t)getpagesize();

	window.begin = data;
	window.end = data + slot->length;
	if (sigsetjmp(window.escape, 1)) {
		*end_ns = clock_now_ns();
		*offset = slot->offset + (uint64_t)(window.fault - window.begin);
		window.begin = window.end = NULL;
		return ERROR_SIGBUS;
	}
	*end_ns = touch(data, slot->length, (size_t)getpagesize());
	/* NB: pages may have been evicted by now, so SIGBUS is possible here, too. */
	reads_verify(reads, slot->offset, data, slot->length);
	window.begin = window.end = NULL;
	return 0;
}

/* Drops the pages, so that the next read asks the device again. The range is widened because
 * the kernel keeps a folio of which only a part is in the range. */
static void forget(int fd, uint64_t begin, uint64_t end)
{
	begin = begin / LARGEST_FOLIO_BYTES * LARGEST_FOLIO_BYTES;
	end = round_up_u64(end, LARGEST_FOLIO_BYTES);
	posix_fadvise(fd, (off_t)begin, (off_t)(end - begin), POSIX_FADV_DONTNEED);
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
		end_ns = clock_now_ns();
	} else {
		/* Otherwise a fault reads ahead, 4 MiB on btrfs. */
		madvise(map, length, MADV_RANDOM);
		/* Short reads go page by page, which would be too slow for long ones. */
		if (slot->length > PAGE_BY_PAGE_BYTES)
			madvise(map, length, MADV_WILLNEED);
		error = look_at(reads, slot, map, &end_ns, &offset);
		munmap(map, length);
		forget(reads->fd, slot->offset, slot->offset + slot->length);
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
