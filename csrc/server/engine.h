/* SPDX-License-Identifier: MIT */
/*
 * The engine: takes a request on the device's address space and answers it from segments.
 *
 * A front end owns one `struct io` per tag, fills in the request and calls engine_submit() on the
 * worker (thread) it belongs to; the worker's io_done() is called once, on the same thread, perhaps
 * before engine_submit() returns. A request that spans segments is cut into parts, which run one
 * after the other: that is rare, and it keeps the common request free of allocation and counting.
 * A request is answered whole or fails whole.
 */
#ifndef SERVER_ENGINE_H
#define SERVER_ENGINE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/mailbox.h"
#include "server/account.h"
#include "server/io_op.h"

struct io_uring;
struct io_uring_sqe;
struct segment;
struct worker;

/* What a segment kind sees: a range that lies inside its segment. */
struct part {
	uint64_t offset; /* bytes from the start of the segment */
	uint32_t length; /* bytes; 0 for a flush */
	uint32_t done;	 /* for the kind's own use: bytes finished so far */
	bool in_place;	 /* set by the kind: it works on the request's own memory, not on `data` */
	uint8_t *data;
	void *private; /* for the kind's own use; NULL at first */
};

/* The first `length` bytes of a buffer are all `byte`; nothing is known of the rest. */
struct uniform {
	uint32_t length;
	uint8_t byte;
};

struct io {
	/* The request, set by the front end. */
	enum io_op op;
	bool fua;	 /* durable before it completes */
	bool no_unmap;	 /* IO_OP_WRITE_ZEROES: keep the blocks allocated */
	uint32_t length; /* bytes */
	uint64_t offset; /* bytes from the start of the device */
	uint8_t *data;	 /* reads and writes */

	/*
	 * `data` is not the request's own memory: the engine has worker.copy() bring over what a kind
	 * has not done in place, in buffer `fixed` of the ring.
	 */
	bool detached;
	bool has_fixed;
	uint16_t fixed;

	/*
	 * What `data` is known to hold, so that the engine need not fill it again. A front end that
	 * gives the io another buffer, or lets anything but the engine write to the one it has,
	 * zeroes this.
	 */
	struct uniform uniform;

	/* The answer: 0, or a negative errno. */
	int result;

	/* The engine's own. */
	struct worker *worker;
	struct segment *segment;
	struct part part;
	uint32_t done;
	uint64_t started_ns; /* of the part; see account_start_ns() */
	struct mail mail;    /* worker_answer() */
	int mailed;	     /* its result */
};

struct segment_ops;

struct engine {
	struct segment *segments; /* in order, without gaps, from 0 to size */
	unsigned segment_count;
	const struct segment_ops **kinds; /* those that the segments are of */
	unsigned kind_count;
	uint64_t size; /* bytes, a multiple of BLOCK_BYTES */
	bool read_only;
	bool dry; /* it only looks whether all can be had; others may be using it */

	/* Descriptors that workers register with their ring; see engine_add_file(). */
	int *files;
	unsigned file_count;

	bool wants_mail; /* some kind calls worker_expect(); to be set by its open() */

	struct worker *workers;
	unsigned worker_count;
};

/* One thread of a front end. Not shared between threads. */
struct worker {
	/* Set by the front end before its first submit. */
	struct engine *engine;
	struct io_uring *ring;
	unsigned first_file; /* index of engine->files[0] in the ring's file table */
	void (*io_done)(struct io *io);
	/*
	 * Copies [offset, offset + length) of `data` to the request of a detached read, or from that
	 * of a detached write. Returns 0 or a negative errno. NULL: no io is detached.
	 */
	int (*copy)(struct io *io, uint32_t offset, uint32_t length);

	/* The engine's own. */
	struct segment *last_segment;
	struct account *account; /* NULL before worker_prepare() */

	/* What other threads have answered; see worker_expect(). */
	struct mailbox mailbox;
	int mail_fd;	     /* eventfd; 0: there is none */
	uint64_t mail_count; /* read from it */
	unsigned expected;   /* parts that are with other threads */
	bool mail_armed;     /* a read of mail_fd is in the ring */
	struct io mail_io;   /* by which its completion is known */
};

/* Acquire what the segments need. Returns 0 or a negative errno, with a message given. */
int engine_open(struct engine *engine, unsigned worker_count);
void engine_close(struct engine *engine);

/* Whether some kind of segment is one that waits for other machines. Before it is opened as well. */
bool engine_waits(const struct engine *engine);

/* Takes ownership of `fd`; returns its index for worker_prepare_file(), or a negative errno. */
int engine_add_file(struct engine *engine, int fd);

/*
 * To be called by the worker's own thread, once that is pinned, before the first submit. Returns 0
 * or a negative errno.
 */
int worker_prepare(struct worker *worker);

void engine_submit(struct worker *worker, struct io *io);

/* Counts a request that the front end fails itself, instead of submitting it. */
void worker_count_refusal(struct worker *worker);

/*
 * To be called after each batch of submits and completions, when the answers to them leave or have
 * left: the latencies of all that was answered in it are counted now.
 */
void worker_end_round(struct worker *worker);

/*
 * For segment kinds: an SQE for `io` on registered file `file`, fields to be filled in by an
 * io_uring_prep_*() call *before* this one; see segment/file.c. The completion arrives in
 * segment_ops.complete.
 */
struct io_uring_sqe *worker_get_sqe(struct worker *worker);
void worker_prepare_file(struct worker *worker, struct io_uring_sqe *sqe, struct io *io,
			 unsigned file);

/*
 * For segment kinds whose parts are finished by other threads. On the io's worker thread, before it
 * is given to another one, or after it came back without worker_answer().
 */
void worker_expect(struct io *io);
void worker_expect_no_more(struct io *io);
/*
 * On any thread, once for each worker_expect(): `result` arrives in segment_ops.complete, on the io's
 * worker thread.
 */
void worker_answer(struct io *io, int result);

/* For segment kinds that write `data`: has it there. Returns 0 or a negative errno. */
int engine_fetch_data(struct io *io);

/* For front ends: a CQE whose user_data is the `struct io` came in. */
void engine_complete(struct io *io, int cqe_result);

/* For segment kinds that finish outside of segment_ops.complete, on the io's worker thread. */
void engine_part_done(struct io *io, int result);

/*
 * Have parts that wait for something outside of this machine fail, now and from now on: the device is
 * to go. Any thread.
 */
void engine_abandon(struct engine *engine);

/* Sum over workers of what segments of kinds[kind] did; any thread. */
void engine_count(const struct engine *engine, unsigned kind, struct kind_account *sum);

/* Requests of all workers that failed before they were any segment's; any thread. */
uint64_t engine_count_refused(const struct engine *engine);

#endif
