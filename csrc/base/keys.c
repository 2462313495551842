/* SPDX-License-Identifier: MIT */
#include "base/keys.h"

#include <errno.h>
#include <string.h>

int keys_take_i64(json_t *keys, const char *key, bool required, int64_t *value, struct error *error)
{
	const json_t *found = json_object_get(keys, key);

	if (!found && !required)
		return 0;
	if (!json_is_integer(found))
		return error_set(error, -EINVAL, "\"%s\" %s", key,
				 found ? "must be an integer" : "is missing");
	*value = json_integer_value(found);
	json_object_del(keys, key);
	return 0;
}

int keys_take_u64(json_t *keys, const char *key, bool required, uint64_t *value,
		  struct error *error)
{
	int64_t number = 0;
	int err;

	if (!required && !json_object_get(keys, key))
		return 0;
	err = keys_take_i64(keys, key, required, &number, error);
	if (err)
		return err;
	if (number < 0)
		return error_set(error, -EINVAL, "\"%s\" is %lld, it must not be negative", key,
				 (long long)number);
	*value = (uint64_t)number;
	return 0;
}

int keys_take_bool(json_t *keys, const char *key, bool *value, struct error *error)
{
	const json_t *found = json_object_get(keys, key);

	if (!found)
		return 0;
	if (!json_is_boolean(found))
		return error_set(error, -EINVAL, "\"%s\" must be true or false", key);
	*value = json_is_true(found);
	json_object_del(keys, key);
	return 0;
}

int keys_take_string(json_t *keys, const char *key, bool required, char **value,
		     struct error *error)
{
	const json_t *found = json_object_get(keys, key);
	const char *text = json_string_value(found);
	char *copy;

	if (!found && !required)
		return 0;
	if (!text || !*text || strlen(text) != json_string_length(found))
		return error_set(error, -EINVAL, "\"%s\" %s", key,
				 found ? "must be a non-empty string" : "is missing");
	copy = strdup(text);
	if (!copy)
		return error_set(error, -ENOMEM, "no memory for \"%s\"", key);
	*value = copy;
	json_object_del(keys, key);
	return 0;
}

int keys_refuse_unknown(const json_t *keys, struct error *error)
{
	const char *key = json_object_iter_key(json_object_iter((json_t *)keys));

	return key ? error_set(error, -EINVAL, "unknown key \"%.100s\"", key) : 0;
}
