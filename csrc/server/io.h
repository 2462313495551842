/* SPDX-License-Identifier: MIT */
/* A request to the device's address space, for front ends, engine and segments. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "base/message_queue.h"

struct segment;
struct worker;

enum io_op {
	IO_OP_READ,
	IO_OP_WRITE,
	IO_OP_FLUSH,
	IO_OP_DISCARD,
	IO_OP_WRITE_ZEROES,
	IO_OP_COUNT,
};

/* The part of a request that lies inside one segment. */
struct part {
	uint64_t offset; /* bytes from the start of the segment */
	uint32_t length; /* bytes; 0 for a flush */
	uint32_t done;	 /* bytes finished so far; for the kind */
	bool in_place;	 /* set by the kind: it uses the request's own memory, not `data` */
	uint8_t *data;
	void *private; /* for the kind; NULL at first */
};

/* The first `length` bytes of a buffer are all `byte`; the rest is unknown. */
struct uniform {
	uint32_t length;
	uint8_t byte;
};

struct io {
	/* The request. Set by the front end. */
	enum io_op op;
	bool fua;	 /* durable before it completes */
	bool no_unmap;	 /* IO_OP_WRITE_ZEROES: keep the blocks allocated */
	uint32_t length; /* bytes */
	uint64_t offset; /* bytes from the start of the device */
	uint8_t *data;	 /* reads and writes */

	/*
	 * `data` is not the request's own memory. The engine calls worker.copy() to transfer what a
	 * kind does not do in place, in buffer `fixed` of the ring.
	 */
	bool detached;
	bool has_fixed;
	uint16_t fixed;

	/*
	 * What `data` is known to contain, so that the engine need not fill it again. A front end
	 * zeroes this when it changes the io's buffer, or when anything but the engine has written
	 * to it.
	 */
	struct uniform uniform;

	/* The result: 0 or a negative errno. */
	int result;

	/* Internal. */
	struct worker *worker;
	struct segment *segment;
	struct part part;
	uint32_t done;
	uint64_t started_ns;	/* of the part; see worker_stats_start_ns() */
	struct message message; /* sent by worker_answer() and engine_answer() */
	int message_result;	/* the result that it brings */
};
