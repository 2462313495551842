/* SPDX-License-Identifier: MIT */
/*
 * The engine takes requests to the device's address space and answers them from segments.
 *
 * A front end has one `struct io` per tag, fills in the request and calls engine_submit() on the
 * worker (thread) that it belongs to. The worker's io_done() is called once on the same thread,
 * perhaps before engine_submit() returns. A request that spans segments is split into parts, which
 * run one after the other. That is rare, and keeps common requests free of allocation and counting.
 * A request is answered as a whole, or fails as a whole.
 */
#ifndef SERVER_ENGINE_H
#define SERVER_ENGINE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "server/io.h"
#include "server/worker_stats.h"

struct io_uring;
struct io_uring_sqe;
struct segment;
struct segment_ops;

struct engine {
	struct segment *segments; /* in order, without gaps, from 0 to size */
	unsigned segment_count;
	const struct segment_ops **kinds; /* the kinds that the segments have */
	unsigned kind_count;
	uint64_t size; /* bytes, a multiple of BLOCK_BYTES */
	bool read_only;
	bool dry; /* only checks whether everything can be had; another server may be using it */

	/* Descriptors that workers register with their rings; see engine_add_file(). */
	int *files;
	unsigned file_count;

	bool wants_messages; /* some kind calls worker_expect(); its open() sets this */

	struct worker *workers;
	unsigned worker_count;
};

/* A thread of a front end. Only that thread uses it. */
struct worker {
	/* Set by the front end before its first request. */
	struct engine *engine;
	struct io_uring *ring;
	unsigned first_file; /* index of engine->files[0] in the ring's file table */
	void (*io_done)(struct io *io);
	/*
	 * Copies [offset, offset + length) of `data` to the request of a detached read, or from
	 * that of a detached write. Returns 0 or a negative errno. NULL: no io is detached.
	 */
	int (*copy)(struct io *io, uint32_t offset, uint32_t length);

	/* Internal. */
	struct segment *last_segment;
	struct worker_stats *stats; /* NULL before worker_prepare() */

	/* Answers from other threads; see worker_expect(). */
	struct message_queue messages;
	int messages_fd;	 /* eventfd; 0: there is none */
	uint64_t messages_count; /* the read's buffer */
	unsigned expected;	 /* number of parts that are with other threads */
	bool messages_armed;	 /* a read of messages_fd is in the ring */
	struct io messages_io;	 /* identifies the completion of that read */
};

/* Opens the segments. Returns 0, or a negative errno after a message. */
int engine_open(struct engine *engine, unsigned worker_count);
void engine_close(struct engine *engine);

/* Whether some kind of segment waits for other machines. May be called before engine_open(). */
bool engine_waits(const struct engine *engine);

/* Takes ownership of `fd`. Returns its index for worker_prepare_file(), or a negative errno. */
int engine_add_file(struct engine *engine, int fd);

/*
 * To be called by the worker's own thread before its first request, once the thread is pinned.
 * Returns 0 or a negative errno.
 */
int worker_prepare(struct worker *worker);

void engine_submit(struct worker *worker, struct io *io);

/* Counts a request that the front end has failed without submitting it. */
void worker_count_refusal(struct worker *worker);

/*
 * To be called after each batch of requests and completions, when their answers leave or have left:
 * adds up the latencies of what was answered.
 */
void worker_end_round(struct worker *worker);

/*
 * Returns an SQE for `io`, for segment kinds. Fill it in with an io_uring_prep_*() call *before*
 * worker_prepare_file(); see segment/file.c. segment_ops.complete gets its completion.
 */
struct io_uring_sqe *worker_get_sqe(struct worker *worker);
void worker_prepare_file(struct worker *worker, struct io_uring_sqe *sqe, struct io *io,
			 unsigned file);

/*
 * For segment kinds whose parts other threads finish. To be called on the io's worker, before the
 * other thread gets it, or after it came back without worker_answer().
 */
void worker_expect(struct io *io);
void worker_expect_no_more(struct io *io);
/*
 * Any thread may call this, once for each worker_expect(). segment_ops.complete gets `result`, on
 * the io's worker.
 */
void worker_answer(struct io *io, int result);

/* Brings the data of a write to `data`. For segment kinds. Returns 0 or a negative errno. */
int engine_fetch_data(struct io *io);

/* Handles a CQE whose user_data is a `struct io`. For front ends. */
void engine_complete(struct io *io, int cqe_result);

/* Finishes a part outside of segment_ops.complete, on the io's worker. For segment kinds. */
void engine_part_done(struct io *io, int result);

/*
 * Fails parts that wait for other machines, now and from now on, because the device is going away.
 * Any thread may call this.
 */
void engine_abandon(struct engine *engine);

/* Adds up what all workers did for segments of kinds[kind]. Any thread may call this. */
void engine_count(const struct engine *engine, unsigned kind, struct kind_stats *sum);

/*
 * Counts the requests of all workers that failed before they reached a segment. Any thread may call
 * this.
 */
uint64_t engine_count_refused(const struct engine *engine);

#endif
