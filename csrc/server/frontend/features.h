/* SPDX-License-Identifier: MIT */
/*
 * Describes what kernels offer to front ends, as JSON: {"available": true or false, "reason": why
 * not, "hint": the hint, "features": [{"name", "since", "offered", "used", "reason"}, ...]}. "used" is
 * "always" (where it is offered), "asked" (by an option), or "never". "offered" is null where this
 * process cannot find out.
 */
#pragma once

#include <jansson.h>

enum feature_offer { FEATURE_UNKNOWN = -1, FEATURE_MISSING, FEATURE_OFFERED };

/* Each returns 0 or -ENOMEM. */
int features_unavailable(json_t *about, const char *what, int err, const char *hint);
int features_add(json_t *about, const char *name, const char *since, enum feature_offer offered,
		 const char *used, const char *reason);
