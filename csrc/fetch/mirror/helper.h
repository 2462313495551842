/* SPDX-License-Identifier: MIT */
/* Helper programs, with input, output and a time limit; and how often they run. */
#pragma once

#include <stdint.h>

#include "base/error.h"
#include "fetch/mirror/secret.h"

/* The protocol's text for "there are none", with a status that is not 0. */
#define HELPER_HAS_NONE "credentials not found"

/*
 * Runs a program found in PATH, with `input` as its whole standard input. Kills it after
 * `timeout_ms`. Its standard error is discarded. Who asks for the same at the same time, or within
 * 5 s, gets the same answer, unless it is the one that `*seen`, at first 0, says the caller has
 * had. So many callers cost one run, and a caller that is refused again and again, or says so, gets
 * -EBUSY: there are 10 runs at once, and then one every 5 s. Returns 0 with its output (at most 64
 * KiB) and status (128 plus the signal's number if a signal ended it), or a negative errno with the
 * error filled in: -ENOENT for a program that is not installed, and never was.
 */
int helper_ask(const char *const arguments[], const char *input, uint32_t timeout_ms,
	       uint64_t *seen, struct secret *output, int *status, struct error *error);
