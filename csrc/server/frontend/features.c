/* SPDX-License-Identifier: MIT */
#include "server/frontend/features.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

int features_unavailable(json_t *about, const char *what, int err, const char *hint)
{
	json_t *reason = json_sprintf("%s: %s", what, strerror(-err));

	if (json_object_set_new(about, "available", json_false()) ||
	    json_object_set_new(about, "reason", reason) ||
	    json_object_set_new(about, "hint", json_string(hint)))
		return -ENOMEM;
	return 0;
}

int features_add(json_t *about, const char *name, const char *since, enum feature_offer offered,
		 const char *used, const char *reason)
{
	json_t *list = json_object_get(about, "features");
	json_t *answer = offered == FEATURE_UNKNOWN ? json_null() : json_boolean(offered);

	if (!list) {
		list = json_array();
		if (json_object_set_new(about, "features", list))
			return -ENOMEM;
	}
	if (json_array_append_new(list, json_pack("{s:s, s:s, s:o, s:s, s:s}", "name", name,
						  "since", since, "offered", answer, "used", used,
						  "reason", reason)))
		return -ENOMEM;
	return 0;
}
