/* SPDX-License-Identifier: MIT */
#ifndef SERVER_STATS_H
#define SERVER_STATS_H

#include <jansson.h>

#include "server/engine.h"

/*
 * What was served so far, in total and by segment kind: {"read_bytes": n, ..., "kinds": {"file":
 * {"read_bytes": n, ...}}}. NULL when memory is short. Any thread may call it.
 */
json_t *stats_json(const struct engine *engine);

#endif
