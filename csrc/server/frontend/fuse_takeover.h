/* SPDX-License-Identifier: MIT */
/*
 * Takes over a FUSE connection that has outlived its server: any process with its descriptors keeps
 * it, with all requests that are not answered. The next server makes its own session believe that
 * the kernel has sent INIT. What the dead server had received is in its journal (fuse_journal.h).
 */
#pragma once

#include <stdint.h>

struct fuse_session;

enum fuse_kept {
	FUSE_KEPT_FILE,
	FUSE_KEPT_DEVICE,
};

/* Checks what a descriptor refers to, and makes it close-on-exec. Returns 0 or a negative errno. */
int fuse_take_kept_fd(int fd, enum fuse_kept what);

/*
 * Gives the session an INIT request. To be called on a thread that has no queue, because the answer
 * goes nowhere.
 */
void fuse_introduce(struct fuse_session *session);

/*
 * Makes the kernel ask for the file's size when it is needed next. To be called when none of our
 * threads waits for that size. Returns 0, or a negative errno after a message.
 */
int fuse_forget_size(int device_fd, uint64_t inode);
