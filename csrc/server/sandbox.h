/* SPDX-License-Identifier: MIT */
/*
 * What keeps a block server from waiting for itself: memory that cannot be paged out, allocations
 * that cannot start I/O, and no view of the file systems that may lie on its own device.
 */
#ifndef SERVER_SANDBOX_H
#define SERVER_SANDBOX_H

#include <stdbool.h>

/*
 * For the process, once everything it needs from the host's file system is open: leaves the host's
 * mount namespace for an empty one, and locks all memory, present and future. Where it is not
 * `privileged`, it stays in its namespace, and locks memory only if it may; it says so. Returns 0 or a
 * negative errno with a message given.
 */
int sandbox_enter(bool privileged);

/* For each thread that serves I/O. Returns 0 or a negative errno. */
int sandbox_io_thread(void);

/*
 * For a thread that serves I/O: from now on it runs before all that is not real-time. Returns 0 or a
 * negative errno; without CAP_SYS_NICE it is -EPERM.
 */
int sandbox_make_realtime(void);

/* False where CAP_SYS_RESOURCE is missing, as in some containers; sandbox_enter() has said so. */
bool sandbox_has_io_flushers(void);

#endif
