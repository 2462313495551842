/* SPDX-License-Identifier: MIT */
/* Runs a helper program with input, output and a time limit. */
#ifndef LAZY_MIRROR_HELPER_H
#define LAZY_MIRROR_HELPER_H

#include <stdint.h>

#include "base/error.h"
#include "lazy/mirror/secret.h"

/*
 * Runs a program found in PATH, with `input` as its whole standard input. Kills it after
 * `timeout_ms`. Its standard error is discarded. Returns 0 with its output (at most 64 KiB) and
 * status (128 plus the signal's number if a signal ended it), or a negative errno with the error
 * filled in.
 */
int helper_run(const char *const arguments[], const char *input, uint32_t timeout_ms,
	       struct secret *output, int *status, struct error *error);

#endif
