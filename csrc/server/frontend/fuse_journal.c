/* SPDX-License-Identifier: MIT */
#include "server/frontend/fuse_journal.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/fileio.h"

/* The first page. Another layout must get another magic. */
struct journal_head {
	char magic[8];
	uint32_t queues;
	uint32_t depth;
	uint32_t buffer_bytes;
};

static const char magic[8] = "bufuse1";

/* NB: otherwise any process with the descriptor could turn accesses to pages into SIGBUS. */
static const int seals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

static size_t queue_bytes(const struct fuse_journal *journal)
{
	return journal->depth * fuse_record_bytes(journal);
}

static off_t offset_of(const struct fuse_journal *journal, unsigned queue)
{
	return (off_t)((size_t)getpagesize() + queue * queue_bytes(journal));
}

int fuse_journal_create(struct fuse_journal *journal)
{
	struct journal_head head = { .queues = journal->queues,
				     .depth = journal->depth,
				     .buffer_bytes = journal->buffer_bytes };

	memcpy(head.magic, magic, sizeof(magic));
	journal->fd = memory_file("fuse requests");
	if (journal->fd < 0)
		return journal->fd;
	if (ftruncate(journal->fd, offset_of(journal, journal->queues)) ||
	    fcntl(journal->fd, F_ADD_SEALS, seals))
		return -errno;
	if (pwrite(journal->fd, &head, sizeof(head), 0) != sizeof(head))
		return -EIO;
	return 0;
}

int fuse_journal_open(struct fuse_journal *journal, int fd, unsigned queues)
{
	struct journal_head head;
	struct stat status;
	int has_seals;

	if (fcntl(fd, F_SETFD, FD_CLOEXEC) || fstat(fd, &status))
		return -errno;
	has_seals = fcntl(fd, F_GET_SEALS);
	if (has_seals < 0 || (has_seals & seals) != seals ||
	    pread(fd, &head, sizeof(head), 0) != sizeof(head) ||
	    memcmp(head.magic, magic, sizeof(magic)) || head.queues != queues)
		return -EINVAL;
	journal->fd = fd;
	journal->queues = queues;
	journal->depth = head.depth;
	journal->buffer_bytes = head.buffer_bytes;
	return status.st_size == offset_of(journal, queues) ? 0 : -EINVAL;
}

int fuse_records_map(struct fuse_records *records)
{
	const struct fuse_journal *journal = records->journal;
	void *start = mmap(NULL, queue_bytes(journal), PROT_READ | PROT_WRITE, MAP_SHARED,
			   journal->fd, offset_of(journal, records->queue));

	if (start == MAP_FAILED)
		return -errno;
	records->start = start;
	return 0;
}

void fuse_records_unmap(struct fuse_records *records)
{
	if (records->start)
		munmap(records->start, queue_bytes(records->journal));
	records->start = NULL;
}

static off_t place_of(const struct fuse_records *records, const struct fuse_record *record)
{
	return offset_of(records->journal, records->queue) +
	       ((const uint8_t *)record - records->start);
}

bool fuse_record_has_header(const struct fuse_records *records, const struct fuse_record *record)
{
	off_t place = place_of(records, record);

	return lseek(records->journal->fd, place, SEEK_DATA) == place;
}

int fuse_record_fill(const struct fuse_records *records, struct fuse_record *record)
{
	size_t bytes = fuse_record_bytes(records->journal);

	/*
	 * The first call gets the memory, and the second one maps it. NB: the second one alone
	 * would block mmap(2) and brk(2) of other threads while it waits for memory.
	 */
	if (fallocate(records->journal->fd, 0, place_of(records, record), (off_t)bytes) ||
	    madvise(record, bytes, MADV_POPULATE_WRITE))
		return -errno;
	return 0;
}

void fuse_record_empty(const struct fuse_records *records, struct fuse_record *record)
{
	if (fallocate(records->journal->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
		      place_of(records, record), (off_t)fuse_record_bytes(records->journal)))
		fuse_record_clear(record);
}
