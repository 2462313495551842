/* SPDX-License-Identifier: MIT */
/* A program that is asked something: input, output, and an end in time. */
#ifndef LAZY_MIRROR_HELPER_H
#define LAZY_MIRROR_HELPER_H

#include <stdint.h>

#include "lazy/complaint.h"
#include "lazy/mirror/secret.h"

/*
 * Run a program of PATH, with `input` and the end of file as its standard input. Waits for
 * `timeout_ms` at most, and kills it then. Its standard error goes nowhere. Returns 0 with its output
 * (64 KiB at most) and its status (128 and a signal's number when that ended it), or a negative errno
 * with the complaint filled in.
 */
int helper_run(const char *const arguments[], const char *input, uint32_t timeout_ms,
	       struct secret *output, int *status, struct complaint *complaint);

#endif
