/* SPDX-License-Identifier: MIT */
#include "tests/failing.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifdef __SANITIZE_ADDRESS__
#define NEXT(name) __interceptor_##name
#else
#define NEXT(name) __libc_##name
#endif

void *NEXT(malloc)(size_t bytes);
void *NEXT(calloc)(size_t count, size_t bytes);
void *NEXT(realloc)(void *memory, size_t bytes);

/* NB: NULL before the sanitizer is ready, and nothing that it looks at may be read. */
static struct failing own, *now;

static bool armed(void)
{
	return now && __atomic_load_n(&now->armed, __ATOMIC_ACQUIRE);
}

/* From before main() on, with what a test has prepared. */
static __attribute__((constructor)) void share(void)
{
	const char *path = getenv("FAILING");
	long fd = path ? syscall(SYS_openat, AT_FDCWD, path, O_RDWR | O_CLOEXEC) : -1;
	void *shared = MAP_FAILED;

	if (path)
		shared = (void *)syscall(SYS_mmap, NULL, sizeof(own), PROT_READ | PROT_WRITE,
					 MAP_SHARED, fd, 0L);
	now = shared == MAP_FAILED ? &own : shared;
	if (fd >= 0)
		syscall(SYS_close, fd);
}

void failing_begin(const char *kind, unsigned long nth, bool later)
{
	snprintf(now->kind, sizeof(now->kind), "%s", kind);
	now->nth = nth;
	now->later = later;
	now->calls = now->failed = 0;
	__atomic_store_n(&now->armed, true, __ATOMIC_RELEASE);
}

unsigned long failing_end(void)
{
	__atomic_store_n(&now->armed, false, __ATOMIC_RELEASE);
	return __atomic_load_n(&now->failed, __ATOMIC_RELAXED);
}

static bool fails(const char *kind, int error)
{
	uint64_t call;

	/* NB: it is also called before main(), and must not allocate. */
	if (!armed() || strcmp(kind, now->kind) != 0)
		return false;
	call = __atomic_add_fetch(&now->calls, 1, __ATOMIC_RELAXED);
	if (call < now->nth || (call > now->nth && !now->later))
		return false;
	__atomic_add_fetch(&now->failed, 1, __ATOMIC_RELAXED);
	errno = error;
	return true;
}

static __thread bool spared;

/* A thread's begin, where the sanitizer allocates and cannot do without. */
int pthread_getattr_np(pthread_t thread, pthread_attr_t *attributes)
{
	int (*next)(pthread_t, pthread_attr_t *) =
		(int (*)(pthread_t, pthread_attr_t *))dlsym(RTLD_NEXT, "pthread_getattr_np");
	int err;

	spared = true;
	err = next(thread, attributes);
	spared = false;
	return err;
}

static bool no_memory(void)
{
	return !spared && fails("allocation", ENOMEM);
}

void *malloc(size_t bytes)
{
	return no_memory() ? NULL : NEXT(malloc)(bytes);
}

void *calloc(size_t count, size_t bytes)
{
	return no_memory() ? NULL : NEXT(calloc)(count, bytes);
}

void *realloc(void *memory, size_t bytes)
{
	return no_memory() ? NULL : NEXT(realloc)(memory, bytes);
}

/* The sanitizer's allocates by itself. */
char *strdup(const char *text)
{
	char *copy = malloc(strlen(text) + 1);

	return copy ? strcpy(copy, text) : NULL;
}

/* Pipes and events do not fail in this way, and libraries rely on that. */
static bool is_regular(int fd)
{
	struct stat status;

	return !fstat(fd, &status) && S_ISREG(status.st_mode);
}

/* NB: with _FILE_OFFSET_BITS=64, headers give these the names of the 64-bit ones. */
#define SYSTEM_CALL(result, name, number, error, parameters, fd, ...)               \
	result name parameters                                                      \
	{                                                                           \
		if (armed() && ((fd) < 0 || is_regular(fd)) && fails(#name, error)) \
			return (result)-1;                                          \
		return (result)syscall(number, __VA_ARGS__);                        \
	}

SYSTEM_CALL(ssize_t, read, SYS_read, EIO, (int fd, void *data, size_t bytes), fd, fd, data, bytes)
SYSTEM_CALL(ssize_t, write, SYS_write, ENOSPC, (int fd, const void *data, size_t bytes), fd, fd,
	    data, bytes)
SYSTEM_CALL(ssize_t, pread, SYS_pread64, EIO, (int fd, void *data, size_t bytes, off_t at), fd, fd,
	    data, bytes, at)
SYSTEM_CALL(ssize_t, pwrite, SYS_pwrite64, ENOSPC,
	    (int fd, const void *data, size_t bytes, off_t at), fd, fd, data, bytes, at)
SYSTEM_CALL(int, fsync, SYS_fsync, EIO, (int fd), fd, fd)
SYSTEM_CALL(int, fdatasync, SYS_fdatasync, EIO, (int fd), fd, fd)
SYSTEM_CALL(int, ftruncate, SYS_ftruncate, ENOSPC, (int fd, off_t bytes), fd, fd, bytes)
SYSTEM_CALL(int, fallocate, SYS_fallocate, ENOSPC, (int fd, int mode, off_t at, off_t bytes), fd,
	    fd, mode, at, bytes)
SYSTEM_CALL(void *, mmap, SYS_mmap, ENOMEM,
	    (void *place, size_t bytes, int access, int flags, int fd, off_t at), -1, place, bytes,
	    access, flags, fd, at)
SYSTEM_CALL(int, dup, SYS_dup, EMFILE, (int fd), -1, fd)
SYSTEM_CALL(int, memfd_create, SYS_memfd_create, EMFILE, (const char *name, unsigned flags), -1,
	    name, flags)
SYSTEM_CALL(int, eventfd, SYS_eventfd2, EMFILE, (unsigned count, int flags), -1, count, flags)
SYSTEM_CALL(int, socketpair, SYS_socketpair, EMFILE,
	    (int domain, int type, int protocol, int ends[2]), -1, domain, type, protocol, ends)

/* Of open(2), too. */
static int open_at(int directory, const char *path, int flags, mode_t mode)
{
	return fails("open", EMFILE) ? -1 : (int)syscall(SYS_openat, directory, path, flags, mode);
}

#define MODE_AFTER(last)                     \
	({                                   \
		va_list list;                \
		mode_t mode;                 \
                                             \
		va_start(list, last);        \
		mode = va_arg(list, mode_t); \
		va_end(list);                \
		mode;                        \
	})

int open(const char *path, int flags, ...)
{
	return open_at(AT_FDCWD, path, flags,
		       flags & (O_CREAT | __O_TMPFILE) ? MODE_AFTER(flags) : 0);
}

int openat(int directory, const char *path, int flags, ...)
{
	return open_at(directory, path, flags,
		       flags & (O_CREAT | __O_TMPFILE) ? MODE_AFTER(flags) : 0);
}
