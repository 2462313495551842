/* SPDX-License-Identifier: MIT */
/*
 * Protects this process from SIGBUS when the file behind mapped bits or checksums is truncated or
 * unreadable. The handler maps zeroes there instead: no unit is cached then, or no checksum
 * matches, and the content counts as damaged.
 */
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "content/cache/internal.h"

enum { GUARDED_COUNT = 1024 };

/* All atomic: the handler reads them. */
struct guarded {
	uintptr_t start; /* 0: free */
	size_t bytes;
	bool *damaged;
};

/* A process may have any number of caches, so there are more of these when one is full. */
struct guarded_part {
	struct guarded entries[GUARDED_COUNT];
	struct guarded_part *next; /* stays: the handler may be going through it */
};

static struct guarded_part parts;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* for changes */
static struct sigaction before;

/* Returns the entry that `address` is in, or NULL. */
static struct guarded *find(uintptr_t address)
{
	for (struct guarded_part *part = &parts; part;
	     part = __atomic_load_n(&part->next, __ATOMIC_ACQUIRE)) {
		for (unsigned i = 0; i < GUARDED_COUNT; i++) {
			struct guarded *entry = &part->entries[i];
			uintptr_t start = __atomic_load_n(&entry->start, __ATOMIC_ACQUIRE);

			if (start && address - start < entry->bytes)
				return entry;
		}
	}
	return NULL;
}

static bool replace(uintptr_t address)
{
	const struct guarded *entry = find(address);

	if (!entry)
		return false;
	__atomic_store_n(entry->damaged, true, __ATOMIC_RELAXED);
	return mmap((void *)entry->start, entry->bytes, PROT_READ,
		    MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) != MAP_FAILED;
}

static void on_sigbus(int number, siginfo_t *info, void *context)
{
	int error = errno;

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

/* Returns a free entry, or NULL without memory for more. */
static struct guarded *take_free(void)
{
	struct guarded_part *part = &parts;

	for (;; part = part->next) {
		for (unsigned i = 0; i < GUARDED_COUNT; i++)
			if (!part->entries[i].start)
				return &part->entries[i];
		if (!part->next)
			__atomic_store_n(&part->next, calloc(1, sizeof(*part)), __ATOMIC_RELEASE);
		if (!part->next)
			return NULL;
	}
}

int guard_add(const void *mapped, size_t bytes, bool *damaged)
{
	static pthread_once_t once = PTHREAD_ONCE_INIT;
	struct guarded *entry;

	pthread_once(&once, install);
	pthread_mutex_lock(&lock);
	entry = take_free();
	if (entry) {
		entry->bytes = bytes;
		entry->damaged = damaged;
		__atomic_store_n(&entry->start, (uintptr_t)mapped, __ATOMIC_RELEASE);
	}
	pthread_mutex_unlock(&lock);
	return entry ? 0 : -ENOMEM;
}

void guard_remove(const void *mapped)
{
	struct guarded *entry;

	pthread_mutex_lock(&lock);
	entry = find((uintptr_t)mapped);
	if (entry)
		__atomic_store_n(&entry->start, 0, __ATOMIC_RELEASE);
	pthread_mutex_unlock(&lock);
}
