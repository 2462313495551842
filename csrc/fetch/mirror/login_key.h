/* SPDX-License-Identifier: MIT */
/* Which key of a configuration file counts for an image: logins.py has the same rules. */
#pragma once

#include <jansson.h>

/*
 * Returns the value in `entries` whose key names `registry` and `repository`, or the beginning of
 * that in whole components, most precisely; or NULL. Keys are names as of images, or URLs. Each
 * part of a host's name may be a pattern, as for the kubelet.
 */
const json_t *login_key_find(const json_t *entries, const char *registry, const char *repository);
