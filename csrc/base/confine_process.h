/* SPDX-License-Identifier: MIT */
/*
 * Confines a whole process that works for strangers: another user, no capabilities, few files to
 * read and none to write, and of the system calls only those that fetching takes.
 */
#pragma once

/* What could not be had on this machine; bits. */
enum {
	CONFINE_LACKS_USER = 1 << 0, /* it still runs as the user who started it */
	CONFINE_LACKS_CAPABILITIES = 1 << 1,
	CONFINE_LACKS_LANDLOCK = 1 << 2,
	CONFINE_LACKS_SECCOMP = 1 << 3,
	/* 1 << 4 is CHANNEL_LACKS_LOCK. Not everybody may read what names and certificates take. */
	CONFINE_LACKS_FILES = 1 << 5,
};

/*
 * To be called once, by the only thread there is. Cannot be undone. From then on, the process is
 * killed when the thread that has started it ends. What is refused fails with
 * EPERM; the process goes on. Returns what is lacking, 0 for nothing.
 */
unsigned confine_process(void);
