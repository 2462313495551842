/* SPDX-License-Identifier: MIT */
/*
 * To be preloaded. The process kills itself before (KILL_BEFORE=N) or after (KILL_AFTER=N) it calls
 * io_uring_submit(3) or io_uring_submit_and_wait(3) for the Nth time. A server talks to its driver
 * only in these calls, so each N is a moment at which a kill -9 could hit it.
 */
#include <dlfcn.h>
#include <signal.h>
#include <stdlib.h>
#include <unistd.h>

struct io_uring;

int io_uring_submit(struct io_uring *ring);
int io_uring_submit_and_wait(struct io_uring *ring, unsigned wait_count);

static unsigned calls;

static void die_if(const char *variable, unsigned call)
{
	const char *text = getenv(variable);

	if (text && strtoul(text, NULL, 10) == call)
		kill(getpid(), SIGKILL);
}

int io_uring_submit(struct io_uring *ring)
{
	int (*next)(struct io_uring *) =
		(int (*)(struct io_uring *))dlsym(RTLD_NEXT, "io_uring_submit");
	unsigned call = __atomic_add_fetch(&calls, 1, __ATOMIC_RELAXED);
	int submitted;

	die_if("KILL_BEFORE", call);
	submitted = next(ring);
	die_if("KILL_AFTER", call);
	return submitted;
}

int io_uring_submit_and_wait(struct io_uring *ring, unsigned wait_count)
{
	int (*next)(struct io_uring *, unsigned) =
		(int (*)(struct io_uring *, unsigned))dlsym(RTLD_NEXT, "io_uring_submit_and_wait");
	unsigned call = __atomic_add_fetch(&calls, 1, __ATOMIC_RELAXED);
	int submitted;

	die_if("KILL_BEFORE", call);
	submitted = next(ring, wait_count);
	die_if("KILL_AFTER", call);
	return submitted;
}
