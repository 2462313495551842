/* SPDX-License-Identifier: MIT */
/*
 * Random reads with a known answer: what to read next, whether the answer is right, and the
 * statistics of it all. Two ways to read share this: direct (read-direct.c) and mapped (read-mapped.c).
 */
#pragma once

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/clock.h"

enum {
	READ_LOG_BLOCKS = 8, /* the longest read is 2^8 blocks, 1 MiB */
	READ_MAX_BYTES = 4096 << READ_LOG_BLOCKS,
	/* Reported errors of each sort; further ones are only counted. */
	EXAMPLES = 8,
	/* 16 buckets per power of two: an error of 6 %. */
	LATENCY_STEPS = 16,
	LATENCY_BUCKETS = 64 * LATENCY_STEPS,
	ERRORS = 256,
	/* Used instead of an errno. */
	ERROR_SHORT = 254, /* the file ended */
	ERROR_SIGBUS = 255,
};

/* A read under way. */
struct slot {
	uint64_t offset;
	uint64_t begin_ns; /* 0: no read */
	uint32_t length;
	uint32_t done; /* bytes of it that have arrived (read-direct.c) */
	bool hung;     /* it was reported */
};

struct example {
	uint64_t offset;
	uint64_t at_ns;
	union {
		int error;
		struct {
			uint64_t expected;
			uint64_t found;
		};
	};
};

struct reads {
	/* Inputs. */
	int fd;
	uint64_t size; /* offsets are less; a multiple of the block size */
	uint64_t base; /* the expected content: the first 8 bytes, */
	int byte;      /* or each byte; -1: use `base` */
	uint64_t deadline_ns;
	uint64_t random; /* state of the generator */
	/* Outputs, under the lock. */
	pthread_mutex_t lock;
	pthread_cond_t idle;
	bool stopping;
	unsigned running; /* threads */
	struct slot *slots;
	unsigned slot_count;
	uint64_t mark_ns; /* when "mark" was read; 0: "served" was said */
	uint64_t marks;
	uint64_t reads, bytes;
	uint64_t wrong_bytes, errors, hung;
	uint64_t by_error[ERRORS];
	struct example wrong[EXAMPLES], failed[EXAMPLES];
	unsigned wrong_words;
	uint64_t last_ns, pause_ns, pause_at_ns, max_ns;
	uint64_t latencies[LATENCY_BUCKETS];
};

/* Chooses what to read and notes the time. Returns false when it is time to end. */
bool reads_begin(struct reads *reads, struct slot *slot);
/* Compares data that was read from `offset` with what is expected. */
void reads_verify(struct reads *reads, uint64_t offset, const void *data, size_t length);
/* Ends the slot's read. `error` is 0, or an errno or ERROR_*, at `offset` in the file. */
void reads_end(struct reads *reads, struct slot *slot, uint64_t end_ns, int error, uint64_t offset);

/* Call this at the end of a thread, when no read of its slots is under way. */
void reads_leave(struct reads *reads);

/* Makes the next successful read that begins after now print "served". */
void reads_mark(struct reads *reads);
/* Counts and prints reads that have been under way for longer than the deadline. */
void reads_find_hung(struct reads *reads);
/* Stops reading. Returns false when reads are still under way after the deadline. */
bool reads_stop(struct reads *reads);
/* Prints the statistics as a line of JSON. Returns 0 or a negative errno. */
int reads_report(struct reads *reads);
static inline bool reads_are_good(const struct reads *reads)
{
	return !reads->wrong_bytes && !reads->errors && !reads->hung;
}

/* The argument of the thread functions below. */
struct reader {
	struct reads *reads;
	struct slot *slots; /* of this thread */
	unsigned slot_count;
	int error; /* out: a negative errno when the thread could not go on */
};
void *read_direct_main(void *argument);
void *read_mapped_main(void *argument);
