/* SPDX-License-Identifier: MIT */
/*
 * The engine takes requests to the device's address space and answers them from segments.
 *
 * A front end has one `struct io` per tag, fills in the request and calls engine_submit() on the
 * worker (thread) that it belongs to. The worker's io_done() is called once on the same thread,
 * perhaps before engine_submit() returns; or, where another thread has the data, that one sends the
 * answer, and io_back() is called instead, later. A request that spans segments is split into
 * parts, which run one after the other. That is rare, and keeps common requests free of allocation
 * and counting. A request is answered as a whole, or fails as a whole.
 */
#pragma once

#include <pthread.h>
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

	/* What engine_answer() has answered; NULL if no kind wants messages. */
	struct worker_stats *elsewhere;
	pthread_mutex_t elsewhere_lock;

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
	/*
	 * Sends the answer to a read, whose bytes are at `data`; any thread may be the caller.
	 * NULL: only the worker's thread can do that.
	 */
	void (*reply)(struct io *io, const uint8_t *data);
	/* With `reply`: the worker has the io again, which was answered. */
	void (*io_back)(struct io *io);
	/* With `reply`: number of requests that other threads answer, or have answered. */
	unsigned lent;

	/* Internal. */
	struct segment *last_segment;
	struct worker_stats *stats; /* NULL before worker_prepare() */

	/* Answers from other threads; see worker_expect(). */
	struct message_queue messages;
	int messages_fd;	   /* eventfd; 0: there is none */
	uint64_t messages_count;   /* the read's buffer */
	unsigned expected;	   /* number of parts that are with other threads */
	bool messages_armed;	   /* a read of messages_fd is in the ring */
	struct message_queue back; /* of ios that were lent */
	bool wants_back;	   /* atomic: it sleeps until one of them comes */
	struct io messages_io;	   /* identifies the completion of that read */
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

/*
 * For segment kinds: another thread sends the answer to this read, whose last part it finishes.
 * Returns false when that cannot be. To be called on the io's worker; then engine_answer() has to
 * be called once, or engine_take_back() on the worker.
 */
bool engine_lend(struct io *io);
void engine_take_back(struct io *io);
/*
 * Any thread may call this, which sends the answer. The bytes are those of io->data, or those of the
 * part at `data` (then it is the whole request). NB: the io may be reused before this returns.
 */
void engine_answer(struct io *io, int result, const uint8_t *data);

/*
 * For front ends: takes the ios back that other threads have answered. Returns whether there were
 * any.
 */
bool worker_take_back(struct worker *worker);
/*
 * The same, and if there are none, the ring has a completion when one comes. To be called before a
 * thread that has lent some waits for that; then it submits what is in the ring.
 */
bool worker_await_back(struct worker *worker);

/* Brings the data of a write to `data`. For segment kinds. Returns 0 or a negative errno. */
int engine_fetch_data(struct io *io);

/* Handles a CQE whose user_data is a `struct io`. For front ends. */
void engine_complete(struct io *io, int cqe_result);

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
