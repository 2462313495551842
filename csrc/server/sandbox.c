/* SPDX-License-Identifier: MIT */
#include "server/sandbox.h"

#include <errno.h>
#include <sched.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/message.h"
#include "base/size.h"

enum {
	/* Both exceed what a request of the largest size takes, without its data. */
	STACK_RESERVE_BYTES = 64 << 10,
	HEAP_RESERVE_BYTES = 64 << 10,
};

static bool io_flusher_allowed;

/* A directory that every system has. It is covered in our own mount namespace only. */
static const char empty_root[] = "/proc";

/*
 * A copy of the host's mounts would keep them alive after they were unmounted, and we would have to
 * flush a mount of our own device in it while we exit. So no mount is kept.
 */
static int leave_mounts(void)
{
	if (unshare(CLONE_NEWNS))
		return -errno;
	if (mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL))
		return -errno;
	if (mount("none", empty_root, "tmpfs", MS_NOSUID | MS_NOEXEC | MS_NODEV, "size=0,mode=500"))
		return -errno;
	if (chdir(empty_root))
		return -errno;
	/* The old root is now stacked on the new one, so "." is the old one again. */
	if (syscall(SYS_pivot_root, ".", "."))
		return -errno;
	if (umount2(".", MNT_DETACH))
		return -errno;
	return chdir("/") ? -errno : 0;
}

/* Try it on this thread, where it has no effect yet, and warn once. */
static int try_io_flusher(void)
{
	if (!prctl(PR_SET_IO_FLUSHER, 1, 0, 0, 0)) {
		prctl(PR_SET_IO_FLUSHER, 0, 0, 0, 0);
		io_flusher_allowed = true;
		return 0;
	}
	if (errno != EPERM)
		return -errno;
	/*
	 * This happens in some containers. Serving is safe except when memory reclaim has to wait
	 * for us.
	 */
	msg_warning("without CAP_SYS_RESOURCE, PR_SET_IO_FLUSHER cannot be set: memory reclaim "
		    "in this server may wait for I/O");
	return 0;
}

/* Stay below the size that free(3) returns to the kernel, so that the heap keeps it. */
static int touch_heap(void)
{
	volatile uint8_t *reserve = malloc(HEAP_RESERVE_BYTES);

	if (!reserve)
		return -ENOMEM;
	for (unsigned i = 0; i < HEAP_RESERVE_BYTES; i += BLOCK_BYTES)
		reserve[i] = 0;
	free((void *)reserve);
	return 0;
}

static __attribute__((noinline)) void touch_stack(void)
{
	volatile uint8_t reserve[STACK_RESERVE_BYTES];

	for (unsigned i = 0; i < sizeof(reserve); i += BLOCK_BYTES)
		reserve[i] = 0;
}

/*
 * Pages are locked when they are touched. Whatever must not wait for memory touches its pages in
 * advance: here, in sandbox_io_thread(), and where buffers are made.
 *
 * NB: pages that are locked later count towards the limit as well. Only without a limit can locking
 * not fail while serving.
 */
static int lock_memory(void)
{
	int err = mlockall(MCL_CURRENT | MCL_FUTURE | MCL_ONFAULT) ? -errno : touch_heap();

	if (err) {
		msg_error("cannot lock memory: %s", strerror(-err));
		msg_hint("raise RLIMIT_MEMLOCK, or run with CAP_IPC_LOCK");
	}
	return err;
}

int sandbox_enter(void)
{
	int err = leave_mounts();

	if (err) {
		msg_error("cannot leave the mount namespace: %s", strerror(-err));
		if (err == -EPERM)
			msg_hint("this needs root (CAP_SYS_ADMIN)");
		return err;
	}
	err = lock_memory();
	if (err)
		return err;
	err = try_io_flusher();
	if (err)
		return msg_fail(err, "cannot set PR_SET_IO_FLUSHER: %s", strerror(-err));
	return err;
}

int sandbox_io_thread(void)
{
	touch_stack();
	if (!io_flusher_allowed)
		return 0;
	/* NB: 1 means on. Memory reclaim for our allocations then never waits for I/O. */
	return prctl(PR_SET_IO_FLUSHER, 1, 0, 0, 0) ? -errno : 0;
}

bool sandbox_has_io_flushers(void)
{
	return io_flusher_allowed;
}
