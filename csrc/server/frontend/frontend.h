/* SPDX-License-Identifier: MIT */
/*
 * A front end makes a block device (or a file) of the engine's address space, and passes requests
 * to the engine's workers. Each is one file (or prefix) behind one ops table.
 */
#pragma once

#include <jansson.h>
#include <stdint.h>
#include <sys/types.h>

#include "server/engine.h"

struct frontend_ops;

/* What happens to the device and its requests when this process dies. */
enum recovery_mode {
	RECOVERY_NONE,	  /* the device goes */
	RECOVERY_REISSUE, /* the next server gets the requests in flight; new ones wait for it */
	RECOVERY_QUEUE,	  /* requests in flight fail; new ones wait */
	RECOVERY_FAIL_IO, /* requests fail until there is another server */
	RECOVERY_AUTO,	  /* the first mode that front end and kernel support */
};

struct frontend {
	/* Set by the caller. */
	const struct frontend_ops *ops;
	struct engine *engine;
	int wanted_id; /* the device's number, if there are numbers; -1: any */
	uint64_t tag;  /* by which `gc` recognizes our devices */
	enum recovery_mode recovery;
	int recover_id; /* the device to take over; -1: make a new one */
	bool grow; /* a device that is taken over may be smaller than the engine's address space */
	uint64_t features; /* flags of ublk_features.h that must be used */

	/* Set by the caller; open() changes them to those of a device that is taken over. */
	unsigned queues;       /* threads, each with a worker of the engine */
	unsigned depth;	       /* requests in flight per queue */
	uint32_t max_io_bytes; /* of a request */
	/*
	 * Descriptors of a FUSE connection to take over, in this order: the file (O_PATH), the
	 * connection, its clone for each queue, and the journal.
	 */
	const int *recover_fds;
	unsigned recover_fd_count; /* 0: make a new connection */

	/* Internal to the front end. */
	void *private;
};

/*
 * Each returns 0, or a negative errno after a message. -EOPNOTSUPP: the kernel lacks what was asked
 * for.
 */
struct frontend_ops {
	const char *name;
	const char *kernel_device; /* exists if the kernel has what this front end needs */
	unsigned default_depth;
	uint32_t default_max_io_bytes;
	/* The depth when requests may wait for other machines; 0: the same. */
	unsigned waiting_depth;
	unsigned waiting_depth_of_all; /* limit for all queues together */
	uint32_t waiting_max_io_bytes;
	const char *takeover_option; /* the option of a server that takes over a device */

	/*
	 * Describes what the kernel has for this front end, and what is used of it; see features.h.
	 * Makes nothing. Returns 0 or -ENOMEM.
	 */
	int (*features)(json_t *about);

	/*
	 * Opens what must be opened while the host's files can be seen; neither makes nor changes a
	 * device.
	 */
	int (*open)(struct frontend *frontend);
	/*
	 * Makes the device or file, or takes it over; it answers reads when this returns. On
	 * failure, removes what was made, and leaves what it could not take over for another try.
	 */
	int (*start)(struct frontend *frontend);
	/* Adds keys to the ready event: "device" or "file", ... */
	int (*describe)(const struct frontend *frontend, json_t *ready);
	/*
	 * The number of the device (st_rdev), or of the file's file system (st_dev). It is also
	 * known after open() if the device is taken over. 0: there is none yet, or it is unknown.
	 */
	dev_t (*number)(const struct frontend *frontend);
	/* A descriptor that becomes readable when the front end has stopped serving; -1: none. */
	int (*ended_fd)(const struct frontend *frontend);
	/* Whether a process has the file open. NULL: only `withdraw` can tell. */
	bool (*in_use)(const struct frontend *frontend);
	/*
	 * Makes sure that the device is not mounted or claimed, and cannot be until stop(), which
	 * follows. Returns 0 or -EBUSY. NULL: only the owner could mount or claim it.
	 */
	int (*withdraw)(struct frontend *frontend);
	/*
	 * Removes the device or file, after serving what is in flight. Requests that come without
	 * end fail after some seconds.
	 */
	int (*stop)(struct frontend *frontend);
	/*
	 * Whether the device remains for another server when this process ends without stop().
	 * NULL: never.
	 */
	bool (*outlives)(const struct frontend *frontend);
	/*
	 * Takes no more requests, and answers those in flight where the kernel allows that. The
	 * process then ends without close().
	 */
	void (*hand_over)(struct frontend *frontend);
	void (*close)(struct frontend *frontend);
};

extern const struct frontend_ops ublk_frontend;
extern const struct frontend_ops fuse_frontend;

/* The name on the command line. */
const char *recovery_name(enum recovery_mode recovery);
/* Returns false when there is no such name. */
bool recovery_find(const char *name, enum recovery_mode *recovery);

/*
 * Prints what all frontend_ops.features describe, as one JSON line: {"ublk": {...}, "fuse": {...}}.
 */
int frontend_print_features(void);

/* Returns NULL when there is no such name. */
const struct frontend_ops *frontend_find(const char *name);
/* Returns the first one that this kernel supports; or NULL, after a message. */
const struct frontend_ops *frontend_default(void);
