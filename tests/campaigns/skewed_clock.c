/* SPDX-License-Identifier: MIT */
/*
 * Preloaded into the block server and its fetch process by faults.py: their wall clock is as
 * many seconds off as SKEW_FILE says, at any time. libfaketime is set up by the environment, of
 * which the fetch process gets none.
 */
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static int (*kernels)(clockid_t, struct timespec *);
static const volatile int64_t *skew_s;

__attribute__((constructor)) static void prepare(void)
{
	int fd = -1;
	void *map;

	kernels = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
	if (!strncmp(program_invocation_short_name, "btrfs-ublk-", 11))
		fd = open(SKEW_FILE, O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		return;
	map = mmap(NULL, sizeof(*skew_s), PROT_READ, MAP_SHARED, fd, 0);
	close(fd);
	if (map != MAP_FAILED)
		skew_s = map;
}

int clock_gettime(clockid_t clock, struct timespec *now)
{
	if (!kernels)
		prepare();
	if (kernels(clock, now))
		return -1;
	if (skew_s && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
		now->tv_sec += *skew_s;
	return 0;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone)
{
	struct timespec exact;

	(void)zone;
	clock_gettime(CLOCK_REALTIME, &exact);
	now->tv_sec = exact.tv_sec;
	now->tv_usec = exact.tv_nsec / 1000;
	return 0;
}

time_t time(time_t *copy)
{
	struct timespec now;

	clock_gettime(CLOCK_REALTIME, &now);
	if (copy)
		*copy = now.tv_sec;
	return now.tv_sec;
}
