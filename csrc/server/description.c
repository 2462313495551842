/* SPDX-License-Identifier: MIT */
#include "server/description.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/cleanup.h"
#include "base/keys.h"
#include "base/message.h"
#include "base/size.h"
#include "server/segment.h"

enum { DESCRIPTION_VERSION = 1, MAX_SEGMENTS = 1 << 20 };

extern const struct segment_ops *const __start_segment_kinds[];
extern const struct segment_ops *const __stop_segment_kinds[];

static const struct segment_ops *segment_kind_find(const char *name)
{
	for (const struct segment_ops *const *kind = __start_segment_kinds;
	     kind < __stop_segment_kinds; kind++) {
		if (!strcmp((*kind)->name, name))
			return *kind;
	}
	return NULL;
}

/* Writes "error, file, memset, ..." to `text`. */
static const char *segment_kind_names(char *text, size_t bytes)
{
	size_t used = 0;

	*text = '\0';
	for (const struct segment_ops *const *kind = __start_segment_kinds;
	     kind < __stop_segment_kinds && used < bytes; kind++)
		used += (size_t)snprintf(text + used, bytes - used, "%s%s", used ? ", " : "",
					 (*kind)->name);
	return text;
}

static int take_kind(json_t *keys, struct segment *segment, struct error *error)
{
	_cleanup_free_ char *name = NULL;
	char known[256];
	int err = keys_take_string(keys, "kind", true, &name, error);

	if (err)
		return err;
	segment->ops = segment_kind_find(name);
	if (!segment->ops) {
		error_set_hint(error, "known kinds: %s", segment_kind_names(known, sizeof(known)));
		return error_set(error, -EINVAL, "unknown segment kind \"%s\"", name);
	}
	if (segment->ops->private_bytes)
		segment->private = calloc(1, segment->ops->private_bytes);
	return segment->ops->private_bytes && !segment->private ? -ENOMEM : 0;
}

/* Numbers the kinds in use, for statistics by kind. */
static int number_kind(struct engine *engine, struct segment *segment)
{
	const struct segment_ops **kinds;

	for (unsigned i = 0; i < engine->kind_count; i++) {
		if (engine->kinds[i] == segment->ops) {
			segment->kind = i;
			return 0;
		}
	}
	kinds = realloc(engine->kinds, (engine->kind_count + 1) * sizeof(*kinds));
	if (!kinds)
		return -ENOMEM;
	engine->kinds = kinds;
	segment->kind = engine->kind_count++;
	kinds[segment->kind] = segment->ops;
	return 0;
}

/* `expected` is the end of the previous segment. */
static int check_range(const struct segment *segment, uint64_t expected, uint64_t size,
		       struct error *error)
{
	unsigned long long offset = segment->offset, length = segment->length;

	if (offset % BLOCK_BYTES || length % BLOCK_BYTES || !length)
		return error_set(
			error, -EINVAL,
			"offset %llu and length %llu must be multiples of %u, and the length not "
			"zero",
			offset, length, BLOCK_BYTES);
	if (offset < expected)
		return error_set(
			error, -EINVAL,
			"it starts at %llu, but the segments before it reach to %llu: segments "
			"must be in order and must not overlap",
			offset, (unsigned long long)expected);
	if (offset > expected) {
		error_set_hint(error, "put an \"error\" or a \"zero\" segment there");
		return error_set(error, -EINVAL, "nothing covers the range from %llu to %llu",
				 (unsigned long long)expected, offset);
	}
	if (length > size - offset)
		return error_set(error, -EINVAL, "it ends at %llu, the device at %llu",
				 offset + length, (unsigned long long)size);
	return 0;
}

static int load_segment(json_t *keys, struct segment *segment, uint64_t expected, uint64_t size,
			struct error *error)
{
	int err;

	if (!json_is_object(keys))
		return error_set(error, -EINVAL, "a segment must be a JSON object");
	err = take_kind(keys, segment, error);
	if (!err)
		err = keys_take_u64(keys, "offset", true, &segment->offset, error);
	if (!err)
		err = keys_take_u64(keys, "length", true, &segment->length, error);
	if (!err)
		err = check_range(segment, expected, size, error);
	if (err)
		return err;
	if (segment->ops->parse)
		err = segment->ops->parse(segment, keys, error);
	return err ?: keys_refuse_unknown(keys, error);
}

static int load_segments(json_t *list, struct engine *engine, struct error *error)
{
	size_t count = json_array_size(list);
	uint64_t expected = 0;

	if (!count || count > MAX_SEGMENTS)
		return error_set(error, -EINVAL, "\"segments\" must be a list of 1 to %d segments",
				 MAX_SEGMENTS);
	engine->segments = calloc(count, sizeof(*engine->segments));
	if (!engine->segments)
		return -ENOMEM;
	for (size_t i = 0; i < count; i++) {
		struct segment *segment = &engine->segments[i];
		int err;

		segment->index = (unsigned)i;
		err = load_segment(json_array_get(list, i), segment, expected, engine->size, error);
		/* Count it as soon as its kind is known, so that engine_close() closes it. */
		if (segment->ops)
			engine->segment_count = (unsigned)i + 1;
		if (!err)
			err = number_kind(engine, segment);
		if (err) {
			error->of = "segment";
			error->number = i;
			return err;
		}
		expected = segment->offset + segment->length;
	}
	if (expected != engine->size) {
		error_set_hint(error, "put an \"error\" or a \"zero\" segment there");
		return error_set(error, -EINVAL,
				 "nothing covers the range from %llu to the device's end at %llu",
				 (unsigned long long)expected, (unsigned long long)engine->size);
	}
	return 0;
}

static int load_root(json_t *root, struct engine *engine, struct error *error)
{
	uint64_t version = 0;
	json_t *segments;
	int err;

	if (!json_is_object(root))
		return error_set(error, -EINVAL, "a description must be a JSON object");
	err = keys_take_u64(root, "version", true, &version, error);
	if (err)
		return err;
	if (version != DESCRIPTION_VERSION)
		return error_set(error, -EINVAL,
				 "description version %llu; this server knows version %d",
				 (unsigned long long)version, DESCRIPTION_VERSION);
	err = keys_take_u64(root, "size", true, &engine->size, error);
	if (err)
		return err;
	if (!engine->size || engine->size % BLOCK_BYTES)
		return error_set(error, -EINVAL,
				 "\"size\" is %llu, it must be a positive multiple of %u",
				 (unsigned long long)engine->size, BLOCK_BYTES);
	engine->read_only = true;
	err = keys_take_bool(root, "read_only", &engine->read_only, error);
	if (err)
		return err;
	segments = json_incref(json_object_get(root, "segments"));
	json_object_del(root, "segments");
	err = keys_refuse_unknown(root, error);
	if (!err)
		err = load_segments(segments, engine, error);
	json_decref(segments);
	return err;
}

int description_load(FILE *input, const char *name, struct engine *engine)
{
	json_error_t fault;
	struct error error = {};
	json_t *root = json_loadf(input, JSON_REJECT_DUPLICATES, &fault);
	int err;

	*engine = (struct engine){};
	err = root ? load_root(root, engine, &error) :
		     error_set(&error, -EINVAL, "%s is not valid JSON: line %d, column %d: %s",
			       name, fault.line, fault.column, fault.text);
	json_decref(root);
	if (!err)
		return 0;
	if (*error.text)
		msg_error_of(&error);
	if (error.of)
		msg_hint("in segment %zu (counted from 0)", error.number);
	engine_close(engine);
	return err;
}
