/* SPDX-License-Identifier: MIT */
/*
 * Calls of this process that fail: allocations, also of libraries, and some system calls. The
 * program that has failing.c defines these functions in the place of libc's, or of the sanitizer's.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

/* In a file that FAILING names, processes share it with each other and with a test. */
struct failing {
	char kind[24];
	uint64_t nth, calls, failed;
	bool later, armed;
};

/*
 * Of those of a kind ("allocation", or the name of a system call), the `nth` from now on (counted
 * from 1) fails, on any thread; with `later`, all after it as well.
 */
void failing_begin(const char *kind, unsigned long nth, bool later);
/* Nothing fails any more. Returns how many have. */
unsigned long failing_end(void);
