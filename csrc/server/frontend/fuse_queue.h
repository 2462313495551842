/* SPDX-License-Identifier: MIT */
/*
 * One thread of the FUSE front end: a descriptor of its own on the connection, its own ring,
 * buffers and engine worker. What it receives, it answers itself.
 */
#ifndef FRONTEND_FUSE_QUEUE_H
#define FRONTEND_FUSE_QUEUE_H

#include <fuse_lowlevel.h>
#include <liburing.h>
#include <semaphore.h>
#include <stdbool.h>
#include <stdint.h>

#include "server/engine.h"
#include "server/thread.h"

/* Ends what a thread waits for, as it must look at `phase`. */
#define FUSE_QUEUE_SIGNAL SIGUSR1

struct fuse_queue;

struct fuse_tag {
	struct io io;
	struct fuse_queue *queue;
	struct fuse_tag *next_free;
	fuse_req_t request;
	uint8_t *buffer;
};

enum fuse_phase {
	FUSE_SERVE,
	FUSE_DRAIN, /* answer until nothing is left, then end */
	FUSE_LEAVE, /* answer what has been taken, then end */
};

/*
 * One thread, the leader, waits for requests; the others rest until there are more than those at work
 * can take. NB: were all to wait in read(2), the kernel would wake them in turn: with one request at
 * a time, each would find its thread on a CPU where something else has begun to run.
 */
struct fuse_crew {
	int leader;	  /* atomic: index of its queue; FUSE_NO_LEADER: none can take any more */
	unsigned resting; /* atomic: threads that nobody has called yet */
	sem_t calls;	  /* posted once for each that is called */
};

enum { FUSE_NO_LEADER = -1 };

struct fuse_queue {
	/* Set by fuse.c. */
	int index;
	unsigned depth;
	uint32_t buffer_bytes;	      /* per tag */
	int device_fd;		      /* a clone of the connection */
	struct thread thread;	      /* `ended_fd` */
	const enum fuse_phase *phase; /* atomic */
	struct fuse_session *session;
	struct fuse_crew *crew;
	struct worker *worker;

	/* The thread's own. */
	struct io_uring ring;
	bool ring_ready;
	bool blocking; /* of device_fd */
	struct fuse_buf received;
	struct fuse_tag *tags;
	struct fuse_tag *free_tags;
	uint8_t *buffers;
	unsigned running; /* tags that are with the engine */
	bool resting;	  /* counted in the crew, and not asleep yet */
	size_t unseen;	  /* bytes served since it looked whether there is more to do */
};

/* Starts the thread and waits until it serves. */
int fuse_queue_start(struct fuse_queue *queue);
/*
 * Ends the thread, now that `phase` says so. Returns false when it still serves after `wait_ms`: to be
 * called again, as a signal that comes just before the thread waits is lost.
 */
bool fuse_queue_stop_within(struct fuse_queue *queue, unsigned wait_ms);

/* How libfuse reads from and writes to the connection: by the descriptor of the calling thread. */
extern const struct fuse_custom_io fuse_queue_io;

/*
 * For the operations of the session, on the thread that they are called on: hand a request to the
 * engine. `data` of a write is copied. The reply follows.
 */
void fuse_queue_submit(fuse_req_t request, enum io_op op, uint64_t offset, size_t length,
		       const void *data, bool flag);

#endif
