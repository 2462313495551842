/* SPDX-License-Identifier: MIT */
/* Counters of the core as JSON; the core's thread writes them, and any thread may read. */
#pragma once

#include <jansson.h>

struct core;

/* Returns a new reference, or NULL when memory is short. */
json_t *fetchstats_json(struct core *core);
