/* SPDX-License-Identifier: MIT */
/* Rules of this server: which caches are in front of which hosts; see docs/design/hosts.md. */
#pragma once

#include <jansson.h>

#include "base/error.h"

/* Those of the device come first. */
enum via_rules { VIA_OF_DEVICE, VIA_OF_HOST, VIA_RULES };

/*
 * Takes [{"for": PATTERN, "caches": [URL, ...], "plain": false}, ...]. The first that matches the host
 * of a mirror without caches of its own counts. To be called before any source is
 * parsed; they count for all sources, so others than before are refused. Returns 0, -EINVAL with
 * the error filled in, or -ENOMEM.
 */
int via_rules_set(enum via_rules whose, const json_t *rules, struct error *error);
/* To be called when no source is parsed any more. */
void via_rules_free(enum via_rules whose);
