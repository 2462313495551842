/* SPDX-License-Identifier: MIT */
/*
 * A FUSE connection that outlives its server: whoever else has its descriptors keeps it, with all
 * requests that are still to be answered. The next server makes its own session believe that it has
 * been introduced to the kernel, and lets the kernel give out again what the dead one had taken.
 */
#ifndef FRONTEND_FUSE_TAKEOVER_H
#define FRONTEND_FUSE_TAKEOVER_H

#include <stdint.h>

struct fuse_session;

enum {
	FUSE_RESEND_MINOR = 40, /* of the protocol, 7.40: Linux 6.9 */
};

enum fuse_kept {
	FUSE_KEPT_FILE,
	FUSE_KEPT_DEVICE,
};

/* Checks what a descriptor is of, and makes it close-on-exec. Returns 0 or a negative errno. */
int fuse_take_kept_fd(int fd, enum fuse_kept what);

/*
 * To be called on a thread that has no queue: the answer to the introduction that the session is
 * given goes nowhere.
 */
void fuse_introduce(struct fuse_session *session);

/*
 * Have the kernel ask for the file's size the next time that somebody wants to know it. To be called
 * while nobody has to wait for that: no thread of ours may. Returns as fuse_resend().
 */
int fuse_forget_size(int device_fd, uint64_t inode);

/*
 * Have all requests that were read, but not answered, given out again. NB: no server may be reading
 * or answering any more, and none yet: a request that is just being read would be lost.
 * Returns 0 or a negative errno, with a message given.
 */
int fuse_resend(int device_fd);

#endif
