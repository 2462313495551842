/* SPDX-License-Identifier: MIT */
/*
 * Makes a thread give up privileges that it does not need, and system calls that it never makes. A
 * server that parses input from strangers runs as root, so a flaw there gives an attacker only
 * what is left.
 *
 * NB: no filter sees what io_uring does for a thread.
 */
#pragma once

#include <stdint.h>

enum confine_role {
	/* starts and ends devices and all other threads; it has no filter */
	CONFINE_MAIN,
	/* answers reads and writes; all that it uses is open already */
	CONFINE_IO,
	/* reads sources and keeps what it has read: files and the network */
	CONFINE_FETCH,
	/* like CONFINE_FETCH, and runs credential helpers */
	CONFINE_HELPERS,
	/* starts the fetch process, which takes itself what it does not need, and ends it */
	CONFINE_SPAWN,
	/* a thread of a process that has confined itself as a whole */
	CONFINE_INHERITED,
};

/*
 * Confines the calling thread, and all that it starts from now on. This cannot be undone. A refused
 * call fails with EPERM, and the kernel logs it (audit type 1326); the server goes on, because
 * ending it would take the device from under a file system. Warns where the kernel has no filters.
 */
void confine_thread(enum confine_role role);
/* Gives up all but these capabilities (bits). Returns 0 or a negative errno. */
int confine_keep_capabilities(uint64_t kept);
