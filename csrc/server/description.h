/* SPDX-License-Identifier: MIT */
/* The JSON description of an address space, as specified in docs/design/protocol.md. */
#pragma once

#include <stdio.h>

#include "server/engine.h"

/*
 * Reads and validates a description. On success, `engine` has its size and segments, and nothing
 * has been opened. Messages call the input `name`. Returns 0, or a negative errno after a
 * message (-EINVAL: the description is wrong).
 */
int description_load(FILE *input, const char *name, struct engine *engine);
