/* SPDX-License-Identifier: MIT */
/*
 * map-look-up asks `"mirror"` what `"name"` is, such as the tag of an image. The mirror is
 * described as for map-add, without the key that names its content. The reply has `"found"`, JSON
 * from the mirror.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/cleanup.h"
#include "base/json_text.h"
#include "base/keys.h"
#include "fetch/inquiry.h"
#include "server/request/request.h"

enum { LOOK_UP_MS = 30 * 1000 };

/* Any digest that the kind accepts; nobody asks for it. */
static const char some_digest[] =
	"sha256:0000000000000000000000000000000000000000000000000000000000000000";

static int look_up_in(struct map_request *request, struct mirror *mirror, const char *name)
{
	_cleanup_free_ char *text = NULL;
	json_t *found;
	int err;

	if (!mirror->ops->has_names)
		return error_set(&request->error, -EINVAL,
				 "a mirror of kind \"%s\" has no names to look up",
				 mirror->ops->name);
	err = mirror_look_up(request->space->fetcher, mirror, name, LOOK_UP_MS, &text,
			     &request->error);
	if (err)
		return err;
	found = text ? json_text_parse(text, strlen(text), 0, NULL) : NULL;
	if (!json_is_object(found)) {
		json_decref(found);
		return error_set(&request->error, -EPROTO,
				 "the mirror's answer for '%s' is no JSON object", name);
	}
	return json_object_set_new(request->body, "found", found) ? -ENOMEM : 0;
}

static int look_up(struct map_request *request)
{
	_cleanup_free_ char *name = NULL;
	json_t *keys = json_incref(json_object_get(request->keys, "mirror"));
	struct source *source = NULL;
	int err;

	json_object_del(request->keys, "mirror");
	err = keys_take_string(request->keys, "name", true, &name, &request->error);
	if (!err)
		err = keys_refuse_unknown(request->keys, &request->error);
	if (!err && !json_is_object(keys))
		err = error_set(&request->error, -EINVAL, "\"mirror\" must be an object");
	if (!err && (json_object_set_new(keys, "digest", json_string(some_digest)) ||
		     json_object_set_new(keys, "size", json_integer(SOURCE_UNIT_MIN_BYTES))))
		err = -ENOMEM;
	if (!err)
		err = source_parse(keys, &source, &request->error);
	if (!err)
		err = look_up_in(request, &source->mirrors[0], name);
	source_free(source);
	json_decref(keys);
	return err;
}

MAP_REQUEST(map_look_up_kind, "map-look-up", look_up);
