/* SPDX-License-Identifier: MIT */
/*
 * To be preloaded. Calls that write to a file at an offset, change its size or sync it fail with
 * FAIL_ERRNO, FAIL_COUNT times, beginning with the FAIL_FROM-th of them (counted from 1).
 * FAIL_SHORT=1: a write does half of its work first, as on a disk that is nearly full. SYNC_MS: a
 * sync takes that much longer. FAIL_UNDER: all of this is for files whose path begins so.
 */
/* This file defines both names of each call, such as `pwrite` and `pwrite64`. */
#undef _FILE_OFFSET_BITS

#include <dlfcn.h>
#include <errno.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static unsigned long calls;

static unsigned long number_of(const char *variable)
{
	const char *text = getenv(variable);

	return text ? strtoul(text, NULL, 10) : 0;
}

static bool concerns(int fd)
{
	const char *under = getenv("FAIL_UNDER");
	char link[32], path[4096];
	ssize_t length;

	if (!under)
		return true;
	snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
	length = readlink(link, path, sizeof(path));
	return length >= (ssize_t)strlen(under) && !strncmp(path, under, strlen(under));
}

/* Returns whether this call is to fail, and sets errno. */
static bool fails(int fd)
{
	unsigned long from = number_of("FAIL_FROM"), call;

	if (!concerns(fd))
		return false;
	call = __atomic_add_fetch(&calls, 1, __ATOMIC_RELAXED);
	if (!from || call < from || call - from >= number_of("FAIL_COUNT"))
		return false;
	errno = (int)number_of("FAIL_ERRNO");
	return true;
}

static void *next_of(const char *name)
{
	void *function = dlsym(RTLD_NEXT, name);

	if (!function)
		abort();
	return function;
}

#define FIND_NEXT(name) __typeof__(&(name)) next = (__typeof__(&(name)))next_of(#name)

/* The next one in a row fails as a whole. */
#define WRITE(name, offset_type)                                                  \
	ssize_t name(int fd, const void *data, size_t length, offset_type offset) \
	{                                                                         \
		FIND_NEXT(name);                                                  \
                                                                                  \
		if (!fails(fd))                                                   \
			return next(fd, data, length, offset);                    \
		if (length > 1 && number_of("FAIL_SHORT"))                        \
			return next(fd, data, length / 2, offset);                \
		return -1;                                                        \
	}

WRITE(pwrite, off_t)
WRITE(pwrite64, off64_t)

#define CHANGE(name, offset_type)                       \
	int name(int fd, offset_type size)              \
	{                                               \
		FIND_NEXT(name);                        \
                                                        \
		return fails(fd) ? -1 : next(fd, size); \
	}

CHANGE(ftruncate, off_t)
CHANGE(ftruncate64, off64_t)

#define SYNC(name)                                           \
	int name(int fd)                                     \
	{                                                    \
		FIND_NEXT(name);                             \
                                                             \
		if (concerns(fd))                            \
			usleep(1000 * number_of("SYNC_MS")); \
		return fails(fd) ? -1 : next(fd);            \
	}

SYNC(fsync)
SYNC(fdatasync)
