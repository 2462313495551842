/* SPDX-License-Identifier: MIT */
/*
 * To be preloaded. The FAIL_NTH-th allocation of the process (counted from 1) fails, and then the
 * file FAIL_SAID is made. With FAIL_ON=1, all later ones fail as well.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

void *__libc_malloc(size_t bytes);
void *__libc_calloc(size_t count, size_t bytes);
void *__libc_realloc(void *memory, size_t bytes);

static unsigned long calls;

static bool fails(void)
{
	/* Nothing here may allocate. */
	const char *nth = getenv("FAIL_NTH"), *said = getenv("FAIL_SAID"), *on = getenv("FAIL_ON");
	unsigned long number = nth ? strtoul(nth, NULL, 10) : 0;
	unsigned long call = __atomic_add_fetch(&calls, 1, __ATOMIC_RELAXED);

	if (!number || call < number || (call > number && !on))
		return false;
	if (call == number && said)
		syscall(SYS_close, syscall(SYS_openat, AT_FDCWD, said, O_CREAT | O_WRONLY, 0600));
	errno = ENOMEM;
	return true;
}

void *malloc(size_t bytes)
{
	return fails() ? NULL : __libc_malloc(bytes);
}

void *calloc(size_t count, size_t bytes)
{
	return fails() ? NULL : __libc_calloc(count, bytes);
}

void *realloc(void *memory, size_t bytes)
{
	return fails() ? NULL : __libc_realloc(memory, bytes);
}
