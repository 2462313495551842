/* SPDX-License-Identifier: MIT */
/*
 * Protects this process from SIGBUS when the file behind mapped bits or checksums is truncated or
 * unreadable. The handler maps zeroes there instead: no unit is cached then, or no checksum
 * matches, and the content counts as damaged.
 */
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>

#include "lazy/cache/internal.h"

enum { GUARDED_MAX = 2 * (CACHE_OBJECTS_MAX + 256) }; /* bits, and sums */

/* All atomic: the handler reads them. */
static struct guarded {
	uintptr_t start; /* 0: free */
	size_t bytes;
	bool *damaged;
} guarded[GUARDED_MAX];

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* for changes */
static struct sigaction before;

static bool replace(uintptr_t address)
{
	for (unsigned i = 0; i < GUARDED_MAX; i++) {
		const struct guarded *entry = &guarded[i];
		uintptr_t start = __atomic_load_n(&entry->start, __ATOMIC_ACQUIRE);

		if (!start || address - start >= entry->bytes)
			continue;
		__atomic_store_n(entry->damaged, true, __ATOMIC_RELAXED);
		return mmap((void *)start, entry->bytes, PROT_READ,
			    MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) != MAP_FAILED;
	}
	return false;
}

static void on_sigbus(int number, siginfo_t *info, void *context)
{
	int error = errno;

	(void)context;
	/* Not our address: restore the former action and return, and the signal comes again. */
	if (!replace((uintptr_t)info->si_addr))
		sigaction(number, &before, NULL);
	errno = error;
}

static void install(void)
{
	struct sigaction action = { .sa_sigaction = on_sigbus, .sa_flags = SA_SIGINFO };

	sigaction(SIGBUS, &action, &before);
}

void guard_add(const void *mapped, size_t bytes, bool *damaged)
{
	static pthread_once_t once = PTHREAD_ONCE_INIT;

	pthread_once(&once, install);
	pthread_mutex_lock(&lock);
	for (unsigned i = 0; i < GUARDED_MAX; i++) {
		if (guarded[i].start)
			continue;
		guarded[i].bytes = bytes;
		guarded[i].damaged = damaged;
		__atomic_store_n(&guarded[i].start, (uintptr_t)mapped, __ATOMIC_RELEASE);
		break;
	}
	pthread_mutex_unlock(&lock);
}

void guard_remove(const void *mapped)
{
	pthread_mutex_lock(&lock);
	for (unsigned i = 0; i < GUARDED_MAX; i++) {
		if (guarded[i].start != (uintptr_t)mapped)
			continue;
		__atomic_store_n(&guarded[i].start, 0, __ATOMIC_RELEASE);
		break;
	}
	pthread_mutex_unlock(&lock);
}
