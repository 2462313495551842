/* SPDX-License-Identifier: MIT */
#include "server/sandbox.h"

#include <errno.h>
#include <sched.h>
#include <stdbool.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/message.h"

static bool io_flusher_allowed;

/* Any directory that every system has; it is covered in our own namespace only. */
static const char empty_root[] = "/proc";

/*
 * A copy of the host's mounts would keep them alive after their owners unmounted them, and a mount
 * of our own device in it would have to be flushed by us while we exit. So nothing is kept.
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
	/* The old root is stacked on the new one, so that "." is the old one again. */
	if (syscall(SYS_pivot_root, ".", "."))
		return -errno;
	if (umount2(".", MNT_DETACH))
		return -errno;
	return chdir("/") ? -errno : 0;
}

/* Tried here, where it has no effect yet, and said once. */
static int try_io_flusher(void)
{
	if (!prctl(PR_SET_IO_FLUSHER, 1, 0, 0, 0)) {
		prctl(PR_SET_IO_FLUSHER, 0, 0, 0, 0);
		io_flusher_allowed = true;
		return 0;
	}
	if (errno != EPERM)
		return -errno;
	/* Some containers. Serving is safe but for one case: reclaim that has to wait for us. */
	msg_warning("without CAP_SYS_RESOURCE, PR_SET_IO_FLUSHER cannot be set: memory reclaim "
		    "in this server may wait for I/O");
	return 0;
}

/*
 * NB: what is locked later counts as well. Only what may be locked without a limit is sure not to fail
 * in the midst.
 */
static int lock_memory(bool insist)
{
	struct rlimit limit;
	int err = 0;

	if (!insist && (getrlimit(RLIMIT_MEMLOCK, &limit) || limit.rlim_cur != RLIM_INFINITY))
		err = -EPERM;
	else if (mlockall(MCL_CURRENT | MCL_FUTURE))
		err = -errno;
	if (err && !insist) {
		msg_warning("memory is not locked: this server may have to wait for swap, and must "
			    "not have any on its own device");
		return 0;
	}
	if (err) {
		msg_error("cannot lock memory: %s", strerror(-err));
		msg_hint("raise RLIMIT_MEMLOCK, or run with CAP_IPC_LOCK");
	}
	return err;
}

int sandbox_enter(bool privileged)
{
	int err = 0;

	if (privileged) {
		err = leave_mounts();
		if (err) {
			msg_error("cannot leave the mount namespace: %s", strerror(-err));
			if (err == -EPERM)
				msg_hint("this needs root (CAP_SYS_ADMIN)");
			return err;
		}
	} else {
		/* NB: the driver wants the path of its device with each command, too. */
		msg_warning("the server stays in its mount namespace: a mount of its own device "
			    "there can keep it from ending");
	}
	err = lock_memory(privileged);
	if (err)
		return err;
	err = try_io_flusher();
	if (err)
		msg_error("cannot set PR_SET_IO_FLUSHER: %s", strerror(-err));
	return err;
}

int sandbox_io_thread(void)
{
	if (!io_flusher_allowed)
		return 0;
	/* NB: 1 means on. Memory reclaim for our allocations then never waits for I/O. */
	return prctl(PR_SET_IO_FLUSHER, 1, 0, 0, 0) ? -errno : 0;
}

int sandbox_make_realtime(void)
{
	/* The lowest priority above all others. Children of the thread start without it. */
	const struct sched_param parameters = { .sched_priority = 1 };

	return sched_setscheduler(0, SCHED_RR | SCHED_RESET_ON_FORK, &parameters) ? -errno : 0;
}

bool sandbox_has_io_flushers(void)
{
	return io_flusher_allowed;
}
