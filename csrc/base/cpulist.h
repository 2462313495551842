/* SPDX-License-Identifier: MIT */
#pragma once

#include <sched.h>

/*
 * Parses "0-3,8" into a set. A newline may end it, as in files of the kernel. Returns 0, -EINVAL
 * (no list) or -ERANGE (a CPU number that does not fit into a cpu_set_t).
 */
int cpulist_parse(const char *text, cpu_set_t *cpus);

enum { CPULIST_TEXT_BYTES = 256 };

/* Formats a set as such a list, which ends in "..." when it does not fit. */
const char *cpulist_format(const cpu_set_t *cpus, char text[static CPULIST_TEXT_BYTES]);
