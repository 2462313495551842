/* SPDX-License-Identifier: MIT */
/*
 * One thread of the FUSE front end, with its own descriptor of the connection, ring, buffers and
 * engine worker. It answers what it receives.
 */
#pragma once

#include <fuse_lowlevel.h>
#include <liburing.h>
#include <semaphore.h>
#include <stdbool.h>
#include <stdint.h>

#include "server/engine.h"
#include "server/frontend/fuse_journal.h"
#include "server/thread.h"

/* Interrupts a thread that waits, so that it checks `phase`. */
#define FUSE_QUEUE_SIGNAL SIGUSR1

struct fuse_queue;

struct fuse_tag {
	struct io io;
	struct fuse_queue *queue;
	struct fuse_tag *next_free;
	fuse_req_t request;
	struct fuse_record *record; /* of this request; its data are the buffer of `io` */
};

enum fuse_phase {
	FUSE_SERVE,
	FUSE_DRAIN, /* answer until no request is left, then end */
	FUSE_LEAVE, /* answer what has been received, then end */
};

/*
 * The threads of a server. One of them, the leader, waits for requests. The others rest until there
 * are more than the working ones can take. NB: if all waited in read(2), the kernel would wake them
 * in turn: with one request at a time, each would find its thread on a CPU where something else has
 * begun to run.
 */
struct fuse_threads {
	int leader;	  /* atomic: index of its queue; FUSE_NO_LEADER: no thread can take more */
	unsigned resting; /* atomic: number of threads that can be called */
	sem_t calls;	  /* posted once for each call */
};

enum { FUSE_NO_LEADER = -1 };

/* How many records a queue always keeps in memory: enough for one request of the largest size. */
enum { FUSE_KEPT_RECORDS = 1 };

/* Whether a queue needs one more record with pages (fuse_allocator.h). */
enum fuse_need {
	FUSE_NEED_NOTHING,
	FUSE_NEED_RECORD, /* set by the queue */
	FUSE_NEED_MET,	  /* set by the allocator */
};

struct fuse_queue {
	/* Set by fuse.c. */
	int index;
	const struct fuse_journal *journal;
	int allocator_fd;	      /* eventfd: written when `need` is set */
	int filled_fd;		      /* eventfd: written by the allocator when `need` is met */
	int device_fd;		      /* a clone of the connection */
	struct thread thread;	      /* `ended_fd` */
	const enum fuse_phase *phase; /* atomic */
	struct fuse_session *session;
	struct fuse_threads *threads;
	struct worker *worker;

	/* Only for the thread itself. */
	struct io_uring ring;
	bool ring_ready;
	bool blocking;	       /* of device_fd */
	struct fuse_tag *tags; /* one per record */
	struct fuse_tag *free_tags;
	/* its request has been received and not yet submitted to the engine */
	struct fuse_tag *current;
	unsigned running; /* tags that are with the engine, including those that are lent */
	bool resting;	  /* it counts in threads->resting, and is not asleep yet */
	size_t unseen;	  /* bytes served since the last check for waiting requests */

	/* Shared with the allocator. */
	struct fuse_records records;
	/* atomic: number of tags, from the first on, whose records have their pages */
	unsigned filled;
	unsigned received;	    /* atomic: number of requests */
	enum fuse_need need;	    /* atomic */
	struct fuse_record *wanted; /* the record that needs pages */
	bool give_back; /* atomic: the queue is idle, and shall keep only FUSE_KEPT_RECORDS */
	unsigned received_before; /* only for the allocator */
};

/* Starts the thread and waits until it serves. */
int fuse_queue_start(struct fuse_queue *queue);
/*
 * Ends the thread; `phase` says how. Returns false when it still serves after `wait_ms`: then call
 * it again, because a signal that comes just before the thread waits is lost.
 */
bool fuse_queue_stop_within(struct fuse_queue *queue, unsigned wait_ms);

/* Makes libfuse use the calling thread's descriptor of the connection. */
extern const struct fuse_custom_io fuse_queue_io;

/*
 * Submits a request to the engine, with the data that came with it. For the operations of the
 * session, on the thread that they are called on. The reply follows later.
 */
void fuse_queue_submit(fuse_req_t request, enum io_op op, uint64_t offset, size_t length,
		       bool flag);
