/* SPDX-License-Identifier: MIT */
/*
 * The requests that a server has received from a FUSE connection and not answered yet. They are in
 * shared memory that outlives the server: a process that keeps the connection open keeps this too,
 * and the next server continues with what it finds. The kernel delivers each request only once (before
 * Linux 6.9, without exception).
 *
 * read(2) of /dev/fuse itself makes the record: it copies the request into a free one, and a
 * process that is killed ends after that call. So whenever the server dies, a request is either
 * still in the kernel or recorded. NB: this holds only while all pages of the record are present
 * and locked: if one had to be brought in, the kernel would fail the request of a killed process.
 * So a record gets its pages before a request is received into it, and gives them back when no
 * request has needed it for a while.
 */
#pragma once

#include <linux/fuse.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <unistd.h>

#include "base/size.h"

enum {
	/*
	 * Fits the header and all arguments of reads and writes, so that `data` is what a write
	 * carries.
	 */
	FUSE_RECORD_ARGUMENTS = 40,
	FUSE_REQUEST_BYTES = sizeof(struct fuse_in_header) + FUSE_RECORD_ARGUMENTS,
};

_Static_assert(sizeof(struct fuse_read_in) == FUSE_RECORD_ARGUMENTS, "struct fuse_read_in");
_Static_assert(sizeof(struct fuse_write_in) == FUSE_RECORD_ARGUMENTS, "struct fuse_write_in");

struct fuse_record {
	/*
	 * The request was carried out, with this result, and may have been answered. It must not be
	 * carried out again, because another write may have followed.
	 */
	uint32_t executed;
	int32_t result;
	uint8_t unused[BLOCK_BYTES - 8 - FUSE_REQUEST_BYTES];
	/* The request, as the kernel has written it. `len` 0: there is none. */
	struct fuse_in_header header;
	uint8_t arguments[FUSE_RECORD_ARGUMENTS];
	uint8_t data[];
};

_Static_assert(offsetof(struct fuse_record, data) == BLOCK_BYTES, "struct fuse_record");

struct fuse_journal {
	int fd;
	unsigned queues;
	unsigned depth;	       /* records per queue */
	uint32_t buffer_bytes; /* data per record */
};

/* Makes a journal with the sizes in `journal`. Returns 0 or a negative errno. */
int fuse_journal_create(struct fuse_journal *journal);
/*
 * Opens the journal of a dead server, and gets its sizes. Returns -EINVAL when `fd` is no journal,
 * or has another number of `queues`.
 */
int fuse_journal_open(struct fuse_journal *journal, int fd, unsigned queues);

/* The records of one queue. */
struct fuse_records {
	const struct fuse_journal *journal;
	unsigned queue;
	uint8_t *start; /* mapped into this process */
};

/*
 * Maps the records of one queue of the journal; none has pages yet. Returns 0 or a negative errno.
 */
int fuse_records_map(struct fuse_records *records);
/* May be called after mapping has failed. */
void fuse_records_unmap(struct fuse_records *records);

/* Whole pages, as each record gets and gives back its own; they may be larger than a block. */
static inline size_t fuse_record_bytes(const struct fuse_journal *journal)
{
	return round_up_u64(sizeof(struct fuse_record) + journal->buffer_bytes,
			    (uint64_t)getpagesize());
}

static inline struct fuse_record *fuse_record_at(const struct fuse_records *records, unsigned index)
{
	return (struct fuse_record *)(records->start + index * fuse_record_bytes(records->journal));
}

/*
 * Whether the header of a record has a page, as it has after a request. Reading it would allocate
 * one.
 */
bool fuse_record_has_header(const struct fuse_records *records, const struct fuse_record *record);
/*
 * Gives a record all its pages, from the NUMA node of the calling thread. Waits for memory, perhaps
 * for ever. Returns 0 or a negative errno.
 */
int fuse_record_fill(const struct fuse_records *records, struct fuse_record *record);
/* Gives back the pages of a record, which clears it. */
void fuse_record_empty(const struct fuse_records *records, struct fuse_record *record);

/* Whether the previous server has left a request in it. */
static inline bool fuse_record_is_left(const struct fuse_journal *journal,
				       const struct fuse_record *record)
{
	uint32_t bytes = record->header.len;

	return bytes >= sizeof(record->header) &&
	       bytes <= FUSE_REQUEST_BYTES + journal->buffer_bytes;
}

/* To be called before the answer is sent. */
static inline void fuse_record_execute(struct fuse_record *record, int result)
{
	record->result = result;
	__atomic_store_n(&record->executed, 1, __ATOMIC_RELEASE);
}

/* To be called after the answer was sent. The order matters: a request must not lose `executed`. */
static inline void fuse_record_clear(struct fuse_record *record)
{
	__atomic_store_n(&record->header.len, 0, __ATOMIC_RELEASE);
	__atomic_store_n(&record->executed, 0, __ATOMIC_RELEASE);
}
