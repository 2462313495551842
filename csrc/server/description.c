/* SPDX-License-Identifier: MIT */
#include "server/description.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

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

int description_take_i64(json_t *keys, const char *key, bool required, int64_t *value)
{
	json_t *found = json_object_get(keys, key);

	if (!found && !required)
		return 0;
	if (!json_is_integer(found)) {
		msg_error("\"%s\" %s", key, found ? "must be an integer" : "is missing");
		return -EINVAL;
	}
	*value = json_integer_value(found);
	json_object_del(keys, key);
	return 0;
}

int description_take_u64(json_t *keys, const char *key, bool required, uint64_t *value)
{
	int64_t number = (int64_t)*value;
	int err;

	if (required)
		number = 0;
	err = description_take_i64(keys, key, required, &number);
	if (err)
		return err;
	if (number < 0) {
		msg_error("\"%s\" is %lld, it must not be negative", key, (long long)number);
		return -EINVAL;
	}
	*value = (uint64_t)number;
	return 0;
}

int description_take_bool(json_t *keys, const char *key, bool *value)
{
	json_t *found = json_object_get(keys, key);

	if (!found)
		return 0;
	if (!json_is_boolean(found)) {
		msg_error("\"%s\" must be true or false", key);
		return -EINVAL;
	}
	*value = json_is_true(found);
	json_object_del(keys, key);
	return 0;
}

int description_take_string(json_t *keys, const char *key, char **value)
{
	json_t *found = json_object_get(keys, key);

	if (!json_is_string(found) || !json_string_length(found)) {
		msg_error("\"%s\" %s", key, found ? "must be a non-empty string" : "is missing");
		return -EINVAL;
	}
	*value = strdup(json_string_value(found));
	if (!*value)
		return -ENOMEM;
	json_object_del(keys, key);
	return 0;
}

int description_take_optional_string(json_t *keys, const char *key, char **value)
{
	return json_object_get(keys, key) ? description_take_string(keys, key, value) : 0;
}

/* Fails if any key of the object is left. */
static int refuse_unknown(json_t *keys)
{
	const char *key = json_object_iter_key(json_object_iter(keys));

	if (!key)
		return 0;
	msg_error("unknown key \"%s\"", key);
	return -EINVAL;
}

static int take_kind(json_t *keys, struct segment *segment)
{
	char *name = NULL;
	char known[256];
	int err = description_take_string(keys, "kind", &name);

	if (err)
		return err;
	segment->ops = segment_kind_find(name);
	if (!segment->ops) {
		msg_error("unknown segment kind \"%s\"", name);
		msg_hint("known kinds: %s", segment_kind_names(known, sizeof(known)));
		err = -EINVAL;
	}
	free(name);
	if (!err && segment->ops->private_bytes) {
		segment->private = calloc(1, segment->ops->private_bytes);
		if (!segment->private)
			err = -ENOMEM;
	}
	return err;
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
static int check_range(const struct segment *segment, uint64_t expected, uint64_t size)
{
	unsigned long long offset = segment->offset, length = segment->length;

	if (offset % BLOCK_BYTES || length % BLOCK_BYTES || !length) {
		msg_error("offset %llu and length %llu must be multiples of %u, and the length not "
			  "zero",
			  offset, length, BLOCK_BYTES);
		return -EINVAL;
	}
	if (offset < expected) {
		msg_error("it starts at %llu, but the segments before it reach to %llu: segments "
			  "must be in order and must not overlap",
			  offset, (unsigned long long)expected);
		return -EINVAL;
	}
	if (offset > expected) {
		msg_error("nothing covers the range from %llu to %llu",
			  (unsigned long long)expected, offset);
		msg_hint("put an \"error\" or a \"zero\" segment there");
		return -EINVAL;
	}
	if (length > size - offset) {
		msg_error("it ends at %llu, the device at %llu", offset + length,
			  (unsigned long long)size);
		return -EINVAL;
	}
	return 0;
}

static int load_segment(json_t *keys, struct segment *segment, uint64_t expected, uint64_t size)
{
	int err;

	if (!json_is_object(keys)) {
		msg_error("a segment must be a JSON object");
		return -EINVAL;
	}
	err = take_kind(keys, segment);
	if (!err)
		err = description_take_u64(keys, "offset", true, &segment->offset);
	if (!err)
		err = description_take_u64(keys, "length", true, &segment->length);
	if (!err)
		err = check_range(segment, expected, size);
	if (err)
		return err;
	if (segment->ops->parse)
		err = segment->ops->parse(segment, keys);
	return err ? err : refuse_unknown(keys);
}

static int load_segments(json_t *list, struct engine *engine)
{
	size_t count = json_array_size(list);
	uint64_t expected = 0;

	if (!count || count > MAX_SEGMENTS) {
		msg_error("\"segments\" must be a list of 1 to %d segments", MAX_SEGMENTS);
		return -EINVAL;
	}
	engine->segments = calloc(count, sizeof(*engine->segments));
	if (!engine->segments)
		return -ENOMEM;
	for (size_t i = 0; i < count; i++) {
		struct segment *segment = &engine->segments[i];
		int err;

		segment->index = (unsigned)i;
		err = load_segment(json_array_get(list, i), segment, expected, engine->size);
		/* Count it as soon as its kind is known, so that engine_close() closes it. */
		if (segment->ops)
			engine->segment_count = (unsigned)i + 1;
		if (!err)
			err = number_kind(engine, segment);
		if (err) {
			msg_hint("in segment %zu (counted from 0) of %zu", i, count);
			return err;
		}
		expected = segment->offset + segment->length;
	}
	if (expected != engine->size) {
		msg_error("nothing covers the range from %llu to the device's end at %llu",
			  (unsigned long long)expected, (unsigned long long)engine->size);
		msg_hint("put an \"error\" or a \"zero\" segment there");
		return -EINVAL;
	}
	return 0;
}

static int load_root(json_t *root, struct engine *engine)
{
	uint64_t version = 0;
	json_t *segments;
	int err;

	if (!json_is_object(root)) {
		msg_error("a description must be a JSON object");
		return -EINVAL;
	}
	err = description_take_u64(root, "version", true, &version);
	if (err)
		return err;
	if (version != DESCRIPTION_VERSION) {
		msg_error("description version %llu; this server knows version %d",
			  (unsigned long long)version, DESCRIPTION_VERSION);
		return -EINVAL;
	}
	err = description_take_u64(root, "size", true, &engine->size);
	if (err)
		return err;
	if (!engine->size || engine->size % BLOCK_BYTES) {
		msg_error("\"size\" is %llu, it must be a positive multiple of %u",
			  (unsigned long long)engine->size, BLOCK_BYTES);
		return -EINVAL;
	}
	engine->read_only = true;
	err = description_take_bool(root, "read_only", &engine->read_only);
	if (err)
		return err;
	segments = json_incref(json_object_get(root, "segments"));
	json_object_del(root, "segments");
	err = refuse_unknown(root);
	if (!err)
		err = load_segments(segments, engine);
	json_decref(segments);
	return err;
}

int description_load(FILE *input, const char *name, struct engine *engine)
{
	json_error_t error;
	json_t *root = json_loadf(input, JSON_REJECT_DUPLICATES, &error);
	int err;

	*engine = (struct engine){};
	if (!root) {
		msg_error("%s is not valid JSON: line %d, column %d: %s", name, error.line,
			  error.column, error.text);
		return -EINVAL;
	}
	err = load_root(root, engine);
	json_decref(root);
	if (err)
		engine_close(engine);
	return err;
}
