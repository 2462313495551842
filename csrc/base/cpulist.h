/* SPDX-License-Identifier: MIT */
#ifndef BASE_CPULIST_H
#define BASE_CPULIST_H

#include <sched.h>

/*
 * Parse "0-3,8" into a set; a newline may end it, as in files of the kernel. Returns 0, -EINVAL (no
 * list) or -ERANGE (a CPU number that a cpu_set_t does not hold).
 */
int cpulist_parse(const char *text, cpu_set_t *cpus);

enum { CPULIST_TEXT_BYTES = 256 };

/* The reverse; what does not fit ends in "...". */
const char *cpulist_format(const cpu_set_t *cpus, char text[static CPULIST_TEXT_BYTES]);

#endif
