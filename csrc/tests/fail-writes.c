/* SPDX-License-Identifier: MIT */
/*
 * To be preloaded. Calls that write to a file at an offset, change its size or sync it fail with
 * FAIL_ERRNO, FAIL_COUNT times, beginning with the FAIL_FROM-th of them (counted from 1).
 * FAIL_SHORT=1: a write does half of its work first, as on a disk that is nearly full. SYNC_MS: a
 * sync takes that much longer.
 */
/* This file defines both names of each call, such as `pwrite` and `pwrite64`. */
#undef _FILE_OFFSET_BITS

#include <dlfcn.h>
#include <errno.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <unistd.h>

static unsigned long calls;

static unsigned long number_of(const char *variable)
{
	const char *text = getenv(variable);

	return text ? strtoul(text, NULL, 10) : 0;
}

/* Returns whether this call is to fail, and sets errno. */
static bool fails(void)
{
	unsigned long from = number_of("FAIL_FROM");
	unsigned long call = __atomic_add_fetch(&calls, 1, __ATOMIC_RELAXED);

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
		if (!fails())                                                     \
			return next(fd, data, length, offset);                    \
		if (length > 1 && number_of("FAIL_SHORT"))                        \
			return next(fd, data, length / 2, offset);                \
		return -1;                                                        \
	}

WRITE(pwrite, off_t)
WRITE(pwrite64, off64_t)

#define CHANGE(name, offset_type)                     \
	int name(int fd, offset_type size)            \
	{                                             \
		FIND_NEXT(name);                      \
                                                      \
		return fails() ? -1 : next(fd, size); \
	}

CHANGE(ftruncate, off_t)
CHANGE(ftruncate64, off64_t)

#define SYNC(name)                                   \
	int name(int fd)                             \
	{                                            \
		FIND_NEXT(name);                     \
                                                     \
		usleep(1000 * number_of("SYNC_MS")); \
		return fails() ? -1 : next(fd);      \
	}

SYNC(fsync)
SYNC(fdatasync)
