/* SPDX-License-Identifier: MIT */
/*
 * Take known keys out of a JSON object, so that unknown ones are left. Each function returns 0,
 * -EINVAL with the error filled in, or -ENOMEM. A missing key that is not required leaves `*value`
 * as it is.
 */
#pragma once

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/error.h"

int keys_take_i64(json_t *keys, const char *key, bool required, int64_t *value,
		  struct error *error);
/* Refuses negative numbers. */
int keys_take_u64(json_t *keys, const char *key, bool required, uint64_t *value,
		  struct error *error);
int keys_take_bool(json_t *keys, const char *key, bool *value, struct error *error);
/* Refuses empty strings, and strings with a NUL. The caller frees `*value`. */
int keys_take_string(json_t *keys, const char *key, bool required, char **value,
		     struct error *error);

/* Fails with "unknown key ..." if any key is left. */
int keys_refuse_unknown(const json_t *keys, struct error *error);
