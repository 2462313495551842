/* SPDX-License-Identifier: MIT */
/*
 * Keeps a block server from waiting for itself: its memory cannot be paged out, its allocations
 * cannot start I/O, and it does not see file systems that may lie on its own device.
 */
#pragma once

#include <stdbool.h>

/*
 * To be called once everything that is needed from the host's files is open. The process leaves the
 * host's mount namespace for an empty one, and all its memory, present and future, is locked once
 * it is touched. Returns 0, or a negative errno after a message.
 */
int sandbox_enter(void);

/*
 * Prepares a thread that serves I/O, and gets its stack into memory. Returns 0 or a negative errno.
 */
int sandbox_io_thread(void);

/*
 * Returns false without CAP_SYS_RESOURCE, as in some containers; sandbox_enter() has warned then.
 */
bool sandbox_has_io_flushers(void);
