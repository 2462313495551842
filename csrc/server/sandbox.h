/* SPDX-License-Identifier: MIT */
/*
 * What keeps a block server from waiting for itself: memory that cannot be paged out, allocations
 * that cannot start I/O, and no view of the file systems that may lie on its own device.
 */
#ifndef SERVER_SANDBOX_H
#define SERVER_SANDBOX_H

/*
 * For the process, once everything it needs from the host's file system is open: leaves the host's
 * mount namespace for an empty one, and locks all memory, present and future. Returns 0 or a
 * negative errno with a message given.
 */
int sandbox_enter(void);

/* For each thread that serves I/O. Returns 0 or a negative errno with a message given. */
int sandbox_io_thread(void);

#endif
