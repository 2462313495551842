/* SPDX-License-Identifier: MIT */
/*
 * Taking known keys out of a JSON object, so that what is left is unknown. Each returns 0, or -EINVAL
 * with the complaint filled in, or -ENOMEM. A key that is missing and not required leaves `*value` as
 * it is.
 */
#ifndef LAZY_KEYS_H
#define LAZY_KEYS_H

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>

#include "lazy/complaint.h"

int keys_take_i64(json_t *keys, const char *key, bool required, int64_t *value,
		  struct complaint *complaint);
/* Refuses what is negative. */
int keys_take_u64(json_t *keys, const char *key, bool required, uint64_t *value,
		  struct complaint *complaint);
int keys_take_bool(json_t *keys, const char *key, bool *value, struct complaint *complaint);
/* Refuses the empty string, and one with a NUL in it. `*value` is to be freed by the caller. */
int keys_take_string(json_t *keys, const char *key, bool required, char **value,
		     struct complaint *complaint);

/* What is left after all known keys were taken: "unknown key ...". */
int keys_refuse_unknown(const json_t *keys, struct complaint *complaint);

#endif
