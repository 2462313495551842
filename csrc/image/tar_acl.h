/* SPDX-License-Identifier: MIT */
/* ACLs of tars are texts; file systems have them as attributes. */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "base/error.h"

struct archive_entry;

/*
 * Returns the bytes of `system.posix_acl_access`, or of `…_default` if `is_default`, and 0 if the
 * entry has none that says more than its mode; or a negative errno, with an error. `*value` is to
 * be freed. `*mode` gets the mask as the permissions of the group, as file systems have it.
 */
int tar_acl(struct archive_entry *entry, int is_default, uint8_t **value, uint32_t *mode,
	    struct error *error);

/*
 * Returns the text of such an attribute, with numbers as names, to be freed. NULL: it is not one
 * that kernels make, or memory is short.
 */
char *tar_acl_text(const uint8_t *value, size_t bytes);
