/* SPDX-License-Identifier: MIT */
#include "content/source.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/keys.h"

extern const struct mirror_ops *const __start_mirror_kinds[];
extern const struct mirror_ops *const __stop_mirror_kinds[];

const struct mirror_ops *mirror_kind_find(const char *name)
{
	for (const struct mirror_ops *const *kind = __start_mirror_kinds;
	     kind < __stop_mirror_kinds; kind++) {
		if (!strcmp((*kind)->name, name))
			return *kind;
	}
	return NULL;
}

/* Writes "file, http, memset, ..." to `text`. */
static const char *mirror_kind_names(char *text, size_t bytes)
{
	size_t used = 0;

	*text = '\0';
	for (const struct mirror_ops *const *kind = __start_mirror_kinds;
	     kind < __stop_mirror_kinds && used < bytes; kind++)
		used += (size_t)snprintf(text + used, bytes - used, "%s%s", used ? ", " : "",
					 (*kind)->name);
	return text;
}

static int take_kind(json_t *keys, struct mirror *mirror, struct error *error)
{
	char *name = NULL;
	char known[256];
	int err = keys_take_string(keys, "kind", true, &name, error);

	if (err)
		return err;
	mirror->ops = mirror_kind_find(name);
	if (!mirror->ops) {
		err = error_set(error, -EINVAL, "unknown kind of mirror \"%.100s\"", name);
		error_set_hint(error, "known kinds: %s", mirror_kind_names(known, sizeof(known)));
	}
	free(name);
	if (err || !mirror->ops->private_bytes)
		return err;
	mirror->private = calloc(1, mirror->ops->private_bytes);
	return mirror->private ? 0 : error_set(error, -ENOMEM, "no memory for a mirror");
}

static int parse_mirror(struct source *source, unsigned index, json_t *keys, struct error *error)
{
	struct mirror *mirror = &source->mirrors[index];
	int err;

	mirror->source = source;
	mirror->index = index;
	if (!json_is_object(keys))
		return error_set(error, -EINVAL, "mirror %u is not an object", index);
	err = take_kind(keys, mirror, error);
	if (err)
		return err;
	/* Count it before parsing: source_free() closes it whatever parse() returns. */
	source->mirror_count = index + 1;
	if (mirror->ops->parse)
		err = mirror->ops->parse(mirror, keys, error);
	if (!err)
		err = keys_refuse_unknown(keys, error);
	if (err)
		error_set_hint(error, "in mirror %u (%s)", index, mirror->ops->name);
	return err;
}

/* What is behind the limit is left out: the mirrors themselves are enough. */
static unsigned count_caches(const struct source *source)
{
	unsigned count = 0;
	uint64_t weight;

	for (unsigned i = 0; i < source->mirror_count; i++) {
		const struct mirror *mirror = &source->mirrors[i];

		for (unsigned n = 0; mirror->ops->cache && n < MIRROR_CACHES_MAX; n++)
			count += mirror->ops->cache(mirror, n, &weight) != NULL;
	}
	return count < SOURCE_PLACES_MAX - source->mirror_count ?
		       count :
		       SOURCE_PLACES_MAX - source->mirror_count;
}

static void add_cache(struct source *source, struct mirror *mirror, const char *via,
		      uint64_t weight)
{
	source->mirrors[source->place_count] = (struct mirror){
		.ops = mirror->ops,
		.source = source,
		.index = source->place_count,
		.origin = mirror,
		.via = via,
		.weight = weight,
		.private = mirror->private,
	};
	source->place_count++;
}

/* Each cache in front of a mirror is one more place, behind the mirrors. */
static int add_caches(struct source *source, struct error *error)
{
	unsigned places = source->mirror_count + count_caches(source);
	struct mirror *mirrors;
	const char *via;
	uint64_t weight;

	source->place_count = source->mirror_count;
	if (places == source->mirror_count)
		return 0;
	mirrors = realloc(source->mirrors, places * sizeof(*mirrors));
	if (!mirrors)
		return error_set(error, -ENOMEM, "no memory for a source");
	source->mirrors = mirrors;
	for (unsigned i = 0; i < source->mirror_count; i++) {
		struct mirror *mirror = &mirrors[i];

		for (unsigned n = 0; mirror->ops->cache && n < MIRROR_CACHES_MAX; n++) {
			via = mirror->ops->cache(mirror, n, &weight);
			if (via && source->place_count < places)
				add_cache(source, mirror, via, weight);
		}
	}
	return 0;
}

/* `list` is an array of mirrors, or the keys of a single one. */
static int parse_mirrors(struct source *source, json_t *list, struct error *error)
{
	bool many = json_is_array(list);
	size_t count = many ? json_array_size(list) : 1;

	if (!count || count > SOURCE_MIRRORS_MAX)
		return error_set(error, -EINVAL, "a source has 1 to %d mirrors, not %zu",
				 SOURCE_MIRRORS_MAX, count);
	source->mirrors = calloc(count, sizeof(*source->mirrors));
	if (!source->mirrors)
		return error_set(error, -ENOMEM, "no memory for a source");
	for (unsigned i = 0; i < count; i++) {
		int err = parse_mirror(source, i, many ? json_array_get(list, i) : list, error);

		if (err)
			return err;
		if (source->mirrors[i].ops->compute && count > 1)
			return error_set(error, -EINVAL,
					 "a mirror of kind %s is computed, it must be the only one",
					 source->mirrors[i].ops->name);
	}
	source->computed = source->mirrors[0].ops->compute != NULL;
	return add_caches(source, error);
}

static int parse_sizes(struct source *source, json_t *keys, struct error *error)
{
	uint64_t unit_bytes = SOURCE_UNIT_DEFAULT_BYTES;
	int err = keys_take_u64(keys, "size", true, &source->size, error);

	if (!err)
		err = keys_take_u64(keys, "unit", false, &unit_bytes, error);
	if (err)
		return err;
	if (!source->size)
		return error_set(error, -EINVAL, "\"size\" is 0");
	if (unit_bytes < SOURCE_UNIT_MIN_BYTES || unit_bytes > SOURCE_UNIT_MAX_BYTES ||
	    (unit_bytes & (unit_bytes - 1)))
		return error_set(error, -EINVAL,
				 "\"unit\" is %llu, it must be a power of two from %d to %d",
				 (unsigned long long)unit_bytes, SOURCE_UNIT_MIN_BYTES,
				 SOURCE_UNIT_MAX_BYTES);
	source->unit_bytes = (uint32_t)unit_bytes;
	source->object_bytes = source->size;
	return 0;
}

static int parse_keys(struct source *source, json_t *keys, struct error *error)
{
	json_t *mirrors = json_object_get(keys, "mirrors");
	int err = parse_sizes(source, keys, error);

	if (err)
		return err;
	if (!mirrors)
		return parse_mirrors(source, keys, error);
	if (!json_is_array(mirrors))
		return error_set(error, -EINVAL, "\"mirrors\" must be a list");
	json_incref(mirrors);
	json_object_del(keys, "mirrors");
	err = keys_refuse_unknown(keys, error);
	if (!err)
		err = parse_mirrors(source, mirrors, error);
	json_decref(mirrors);
	return err;
}

int source_parse(const json_t *text, struct source **source, struct error *error)
{
	struct source *made;
	json_t *keys;
	int err;

	if (!json_is_object(text))
		return error_set(error, -EINVAL, "a source must be a JSON object");
	made = calloc(1, sizeof(*made));
	keys = json_deep_copy(text);
	if (made && keys)
		err = parse_keys(made, keys, error);
	else
		err = error_set(error, -ENOMEM, "no memory for a source");
	json_decref(keys);
	if (err)
		source_free(made);
	else
		*source = made;
	return err;
}

void source_free(struct source *source)
{
	if (!source)
		return;
	for (unsigned i = 0; i < source->mirror_count; i++) {
		struct mirror *mirror = &source->mirrors[i];

		if (mirror->ops->close)
			mirror->ops->close(mirror);
		free(mirror->doubted);
		free(mirror->identity);
		free(mirror->private);
	}
	free(source->mirrors);
	free(source->index);
	free(source->selection);
	free(source->coded_kinds);
	free(source);
}
