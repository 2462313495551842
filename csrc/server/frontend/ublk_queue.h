/* SPDX-License-Identifier: MIT */
/* One ublk hardware queue: a thread with its own ring, buffers and engine worker. */
#pragma once

#include <liburing.h>
#include <stdbool.h>
#include <stdint.h>

#include "server/engine.h"
#include "server/frontend/ublk_uapi.h"
#include "server/thread.h"

struct ublk_queue;

struct ublk_tag {
	struct io io;
	struct ublk_queue *queue;
	uint16_t tag;
};

struct ublk_queue {
	/* Set by ublk.c. */
	uint16_t index;
	uint16_t depth;
	uint32_t buffer_bytes; /* per tag */
	bool encoded;	       /* opcodes in ioctl form */
	/*
	 * A request's memory is a buffer of the ring, whose index is the tag. What is not read or
	 * written there is copied, by means of device_fd.
	 */
	bool registered;
	int device_fd;	      /* /dev/ublkcN */
	const bool *draining; /* atomic: end once a tag was aborted and all requests are answered */
	struct thread thread; /* `cpus`, and `ended_fd`, which also tells when a queue has failed */
	struct worker *worker;

	/* Only for the thread itself. */
	struct io_uring ring;
	const struct ublksrv_io_desc *descriptors;
	struct ublk_tag *tags;
	uint8_t *buffers;
	unsigned offered; /* tags that are with the driver */
	unsigned running; /* tags that are with the engine */
	bool aborted;	  /* some tag was aborted, so no request comes any more */
};

/* Starts the thread and waits until all tags are on offer. */
int ublk_queue_start(struct ublk_queue *queue);
/* Waits for the thread, which ends when the driver has aborted all tags. */
void ublk_queue_join(struct ublk_queue *queue);
/* Returns false when it has not ended within `wait_ms`; it must be joined later. */
bool ublk_queue_join_within(struct ublk_queue *queue, unsigned wait_ms);
