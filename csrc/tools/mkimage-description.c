/* SPDX-License-Identifier: MIT */
#include "tools/mkimage-description.h"

#include <errno.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>

#include "base/array.h"
#include "base/hex.h"
#include "base/json_text.h"
#include "base/size.h"
#include "btrfs/format.h"
#include "content/selection.h"
#include "image/data.h"

enum {
	LEVEL_MAX = 19,
	UNIT_BYTES = 256 << 10,
	UNIT_BYTES_MAX = 64 << 20,
	INLINE_BYTES = 2048,
	READ_BYTES = 1 << 16,
	LAYERS_MAX = 1024,
};

const char *digest_format(const uint8_t digest[DIFF_ID_BYTES], char text[static DIGEST_TEXT_BYTES])
{
	strcpy(text, "sha256:");
	hex_encode(digest, DIFF_ID_BYTES, text + strlen(text));
	return text;
}

static int digest_parse(const char *text, uint8_t digest[DIFF_ID_BYTES], struct error *error)
{
	if (strlen(text) == DIGEST_TEXT_BYTES - 1 && !strncmp(text, "sha256:", 7) &&
	    hex_decode(text + 7, digest, DIFF_ID_BYTES))
		return 0;
	return error_set(error, -EINVAL, "\"diff_id\": \"%s\" is not \"sha256:\" and 64 digits",
			 text);
}

static int parse_compression(struct description *description, const char *text, struct error *error)
{
	const char *digits = text + strlen("zstd:");
	char *end = NULL;
	long level;

	if (!strcmp(text, "none")) {
		description->level = 0;
		return 0;
	}
	if (!strncmp(text, "zstd:", strlen("zstd:")) && *digits >= '0' && *digits <= '9') {
		level = strtol(digits, &end, 10);
		if (!*end && level >= 1 && level <= LEVEL_MAX) {
			description->level = (int)level;
			return 0;
		}
	}
	error_set_hint(error, "give \"none\", or \"zstd:1\" to \"zstd:%d\"", LEVEL_MAX);
	return error_set(error, -EINVAL, "\"compression\": \"%s\" is none that we have", text);
}

static int check_name(const char *name, struct error *error)
{
	if (*name && strlen(name) <= NAME_MAX_BYTES && !strchr(name, '/') && strcmp(name, ".") &&
	    strcmp(name, ".."))
		return 0;
	return error_set(error, -EINVAL, "\"name\": \"%s\" cannot be that of a subvolume", name);
}

static int parse_layer(struct description *description, struct layer *layer, json_t *json,
		       struct error *error)
{
	const char *kind, *path, *name = NULL, *diff_id = NULL;
	json_error_t fault;
	int ret = 0, whiteouts = 0;

	if (json_unpack_ex(json, &fault, 0, "{s:s, s:s, s?:s, s?:s, s?:b !}", "kind", &kind, "path",
			   &path, "name", &name, "diff_id", &diff_id, "whiteouts", &whiteouts))
		return error_set(error, -EINVAL, "a layer: %s", fault.text);
	layer->options.path = path;
	layer->options.time_s = description->time_s;
	layer->is_tar = strcmp(kind, "directory") != 0;
	layer->options.is_oci_layer = whiteouts;
	layer->read = layer->is_tar ? source_read_tar : source_read_directory;
	if (layer->is_tar && strcmp(kind, "tar")) {
		error_set_hint(error, "give \"directory\" or \"tar\"");
		return error_set(error, -EINVAL, "\"kind\": \"%s\" is none that we have", kind);
	}
	if (description->in_layers && !layer->is_tar)
		return error_set(error, -EINVAL, "\"in_layers\": a directory is no layer");
	if (whiteouts && !layer->is_tar)
		return error_set(error, -EINVAL, "\"whiteouts\": a directory has none");
	if (diff_id && !layer->is_tar)
		return error_set(error, -EINVAL, "\"diff_id\": a directory has none");
	if (diff_id) {
		ret = digest_parse(diff_id, layer->diff_id, error);
		layer->options.diff_id = layer->diff_id;
	}
	if (!ret && name)
		ret = check_name(name, error);
	if (!ret && name) {
		layer->name = strdup(name);
		ret = layer->name ? 0 : error_set(error, -ENOMEM, "no memory");
	}
	return ret;
}

static int parse_layers(struct description *description, json_t *json, struct error *error)
{
	size_t count = json_array_size(json);
	int ret = 0;

	if (!count || count > LAYERS_MAX)
		return error_set(error, -EINVAL, "\"layers\": it has to be a list of 1 to %d",
				 LAYERS_MAX);
	description->layers = calloc(count, sizeof(*description->layers));
	if (!description->layers)
		return error_set(error, -ENOMEM, "no memory");
	description->layer_count = count;
	for (size_t i = 0; i < count && !ret; i++)
		ret = parse_layer(description, &description->layers[i], json_array_get(json, i),
				  error);
	/* Names that are not given are different anyway. */
	for (size_t i = 0; i < count && !ret; i++) {
		for (size_t j = 0; j < i && description->layers[i].name; j++) {
			if (description->layers[j].name &&
			    !strcmp(description->layers[i].name, description->layers[j].name))
				return error_set(error, -EINVAL,
						 "\"name\": two layers have the name \"%s\"",
						 description->layers[i].name);
		}
	}
	return ret;
}

static int parse_first(struct description *description, json_t *json, struct error *error)
{
	size_t count = json_array_size(json);

	if (json && !json_is_array(json))
		return error_set(error, -EINVAL, "\"first\" is not a list");
	if (!count)
		return 0;
	description->first = calloc(count, sizeof(*description->first));
	if (!description->first)
		return error_set(error, -ENOMEM, "no memory");
	description->first_count = count;
	for (size_t i = 0; i < count; i++) {
		json_int_t offset, length;
		const char *path;
		json_error_t fault;

		if (json_unpack_ex(json_array_get(json, i), &fault, JSON_STRICT, "[sII]", &path,
				   &offset, &length))
			return error_set(error, -EINVAL, "\"first\", number %zu: %s", i,
					 fault.text);
		if (offset < 0 || length < 0)
			return error_set(error, -EINVAL,
					 "\"first\", number %zu: %lld bytes at %lld", i,
					 (long long)length, (long long)offset);
		description->first[i] =
			(struct first_range){ path, (uint64_t)offset, (uint64_t)length, 0 };
	}
	return 0;
}

static int parse_number(const char *key, json_int_t value, json_int_t least, json_int_t most,
			struct error *error)
{
	if (value >= least && value <= most)
		return 0;
	return error_set(error, -EINVAL, "\"%s\" is %lld, it must be %lld to %lld", key,
			 (long long)value, (long long)least, (long long)most);
}

/* The default is that of reproducible builds, or 1970, so that two builds are equal. */
static int default_time(json_int_t *time_s, struct error *error)
{
	const char *epoch = getenv("SOURCE_DATE_EPOCH");
	char *end;

	*time_s = 0;
	if (!epoch || !*epoch)
		return 0;
	errno = 0;
	*time_s = strtoll(epoch, &end, 10);
	if (errno || *end || *epoch < '0' || *epoch > '9')
		return error_set(error, -EINVAL,
				 "SOURCE_DATE_EPOCH: \"%s\" is not a number of seconds", epoch);
	return 0;
}

static unsigned cpu_count(void)
{
	cpu_set_t set;

	if (sched_getaffinity(0, sizeof(set), &set))
		return 1;
	return (unsigned)CPU_COUNT(&set);
}

static int parse(struct description *description, struct error *error)
{
	json_int_t max_inline = INLINE_BYTES, unit = UNIT_BYTES, threads = cpu_count(), time_s;
	const char *compression = "zstd:9", *checksum = "crc32c";
	json_error_t fault;
	json_t *layers, *first = NULL;
	int in_layers = 0;
	int ret = default_time(&time_s, error);

	if (threads > DATA_THREADS_MAX)
		threads = DATA_THREADS_MAX;
	description->label = "";
	if (ret)
		return ret;
	if (json_unpack_ex(description->json, &fault, 0,
			   "{s:o, s:s, s?:s, s?:I, s?:s, s?:I, s?:I, s?:I, s?:s, s?:o, s?:b !}",
			   "layers", &layers, "output", &description->output, "compression",
			   &compression, "max_inline", &max_inline, "checksum", &checksum, "time",
			   &time_s, "threads", &threads, "unit", &unit, "label",
			   &description->label, "first", &first, "in_layers", &in_layers))
		return error_set(error, -EINVAL, "%s", fault.text);
	ret = parse_first(description, first, error);
	if (!ret)
		ret = parse_compression(description, compression, error);
	if (!ret)
		ret = parse_number("max_inline", max_inline, 0, DATA_INLINE_BYTES_MAX, error);
	if (!ret)
		ret = parse_number("unit", unit, BLOCK_BYTES, UNIT_BYTES_MAX, error);
	if (!ret && unit % BLOCK_BYTES)
		ret = error_set(error, -EINVAL, "\"unit\" is %lld, which is not a multiple of %u",
				(long long)unit, BLOCK_BYTES);
	if (!ret)
		ret = parse_number("threads", threads, 1, DATA_THREADS_MAX, error);
	if (ret)
		return ret;
	if (strlen(description->label) >= LABEL_BYTES || strchr(description->label, '\n'))
		return error_set(error, -EINVAL, "\"label\" has to be one line of at most %d bytes",
				 LABEL_BYTES - 1);
	description->max_inline = (uint32_t)max_inline;
	description->unit_bytes = (uint32_t)unit;
	description->threads = (unsigned)threads;
	description->time_s = time_s;
	description->in_layers = in_layers;
	if (in_layers && (description->level || first))
		return error_set(error, -EINVAL,
				 "\"in_layers\": what stays in layers is neither compressed nor "
				 "put first");
	if (in_layers && (unit > SELECTION_UNIT_MAX_BYTES || unit & (unit - 1)))
		return error_set(error, -EINVAL,
				 "\"unit\" is %lld, which \"in_layers\" wants to be a power of "
				 "two, %d at most",
				 (long long)unit, SELECTION_UNIT_MAX_BYTES);
	description->csum = csum_kind_by_name(checksum);
	if (!description->csum)
		return error_set(
			error, -EINVAL,
			"\"checksum\": \"%s\" is none of crc32c, xxhash64, sha256 and blake2b",
			checksum);
	return parse_layers(description, layers, error);
}

static int read_all(FILE *stream, char **text, size_t *length, struct error *error)
{
	size_t capacity = 0, got;

	do {
		if (array_reserve(*text, capacity, *length + READ_BYTES))
			return error_set(error, -ENOMEM, "no memory");
		got = fread(*text + *length, 1, capacity - *length, stream);
		*length += got;
	} while (got);
	return ferror(stream) ? error_set(error, -EIO, "cannot be read") : 0;
}

int description_read(struct description *description, FILE *stream, struct error *error)
{
	char *text = NULL;
	size_t length = 0;
	json_error_t fault;
	int ret;

	*description = (struct description){ 0 };
	ret = read_all(stream, &text, &length, error);
	if (!ret) {
		description->json = json_text_parse(text, length, JSON_REJECT_DUPLICATES, &fault);
		ret = description->json ? parse(description, error) :
					  error_set(error, -EINVAL, "%s", json_text_fault(&fault));
	}
	free(text);
	return ret;
}

void description_deinit(struct description *description)
{
	for (size_t i = 0; i < description->layer_count; i++)
		free(description->layers[i].name);
	free(description->layers);
	free(description->first);
	json_decref(description->json);
}
