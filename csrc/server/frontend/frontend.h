/* SPDX-License-Identifier: MIT */
/*
 * A front end makes the engine's address space a block device (or a file) and feeds requests to the
 * engine's workers. One front end = one file (or prefix) behind one ops table.
 */
#ifndef SERVER_FRONTEND_H
#define SERVER_FRONTEND_H

#include <jansson.h>
#include <stdint.h>
#include <sys/types.h>

#include "server/engine.h"
#include "server/placement.h"

struct frontend_ops;

/* What becomes of the device, and of its requests, when this process dies. */
enum recovery_mode {
	RECOVERY_NONE,	  /* it goes */
	RECOVERY_REISSUE, /* requests in flight are given to the next server, new ones wait for it */
	RECOVERY_QUEUE,	  /* requests in flight fail, new ones wait */
	RECOVERY_FAIL_IO, /* requests fail until there is another server */
	RECOVERY_SWAP,	  /* the same; the owner then moves the loop device to that one's file */
	RECOVERY_AUTO,	  /* the first that the front end and the kernel have */
};

struct frontend {
	/* Set by the caller. */
	const struct frontend_ops *ops;
	struct engine *engine;
	struct placement *placement; /* of the threads to come */
	bool realtime;		     /* threads run before all that is not */
	bool page_cache;	     /* of the file, where the device is one */
	bool unprivileged;	     /* the device is of the user of this process */
	int wanted_id;		     /* of the device, where there are numbers; -1: any */
	uint64_t tag;		     /* by which `gc` recognises what was made */
	enum recovery_mode recovery;
	int recover_id; /* the device to take over; -1: a new one is made */
	bool grow;	/* what is taken over may be smaller than the engine's address space */
	/* Features of ublk_features.h to insist on, and to do without. */
	uint64_t features_on;
	uint64_t features_off;

	/* Set by the caller, or by open() to what a device that is taken over has. */
	unsigned queues;       /* threads, each with a worker of the engine */
	unsigned depth;	       /* requests in flight per queue */
	uint32_t max_io_bytes; /* of one request */
	/*
	 * Descriptors of a FUSE connection to take over: the file (O_PATH), the connection, and one
	 * for each queue.
	 */
	const int *recover_fds;
	unsigned recover_fd_count; /* 0: a new connection is made */

	/* The front end's own. */
	void *private;
};

/*
 * Each returns 0 or a negative errno, with a message given. -EOPNOTSUPP: the kernel lacks what was
 * asked for.
 */
struct frontend_ops {
	const char *name;
	const char *kernel_device; /* is there where the kernel has what this front end needs */
	unsigned default_depth;
	uint32_t default_max_io_bytes;
	/* The same where requests may have to wait for other machines; 0: no other ones. */
	unsigned waiting_depth;
	unsigned waiting_depth_of_all; /* queues together, where it is less */
	uint32_t waiting_max_io_bytes;
	const char *takeover_option; /* of a server that comes after one that left its device */

	/*
	 * What the kernel has for this front end, and what is used of it; see features.h. Makes
	 * nothing. Returns 0, or -ENOMEM.
	 */
	int (*features)(json_t *about);

	/* Acquire what needs the host's view of the file system; makes and changes no device. */
	int (*open)(struct frontend *frontend);
	/*
	 * Make the device or file, or take it over; it answers reads when this returns. On failure,
	 * what was made is undone, and what was to be taken over is left for another try.
	 */
	int (*start)(struct frontend *frontend);
	/* Keys for the ready line: "device" or "file", ... */
	int (*describe)(const struct frontend *frontend, json_t *ready);
	/*
	 * The device, or with a file the file system that it is in, by its number (st_rdev, st_dev);
	 * after open() as well, if it is taken over. 0: there is none yet, or it is not known.
	 */
	dev_t (*number)(const struct frontend *frontend);
	/* A descriptor that becomes readable when the front end serves no more; -1: none. */
	int (*ended_fd)(const struct frontend *frontend);
	/* Whether somebody has the file open. NULL: `withdraw` tells. */
	bool (*in_use)(const struct frontend *frontend);
	/*
	 * Make sure that nobody has the device mounted or claimed, nor will until stop(), which is
	 * to follow. Returns 0, or -EBUSY. NULL: nobody can do so without the owner.
	 */
	int (*withdraw)(struct frontend *frontend);
	/*
	 * Remove the device or file, serving what is still in flight. Where requests come without
	 * an end, they fail after some seconds.
	 */
	int (*stop)(struct frontend *frontend);
	/*
	 * Whether the device is there for another server when this process ends without stop().
	 * NULL: never.
	 */
	bool (*outlives)(const struct frontend *frontend);
	/*
	 * Take no more requests, and answer those in flight where the kernel makes that possible.
	 * The process then ends without close().
	 */
	void (*hand_over)(struct frontend *frontend);
	void (*close)(struct frontend *frontend);
};

extern const struct frontend_ops ublk_frontend;
extern const struct frontend_ops fuse_frontend;

/* As on the command line. */
const char *recovery_name(enum recovery_mode recovery);
/* Returns false when there is none of that name. */
bool recovery_find(const char *name, enum recovery_mode *recovery);

/* Prints what frontend_ops.features say, as one JSON line: {"ublk": {...}, "fuse": {...}}. */
int frontend_print_features(void);

/* NULL: there is none of that name. */
const struct frontend_ops *frontend_find(const char *name);
/* The first one that this kernel can do. NULL, with a message given: none. */
const struct frontend_ops *frontend_default(void);

#endif
