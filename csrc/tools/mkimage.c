/* SPDX-License-Identifier: MIT */
/*
 * btrfs-ublk-mkimage: makes a sealed image (docs/design/images.md) of directories and tars. A
 * description is read from standard input, and a report written to standard output, both JSON.
 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <openssl/evp.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <uuid/uuid.h>

#include "base/cleanup.h"
#include "base/fileio.h"
#include "base/json_text.h"
#include "base/message.h"
#include "btrfs/outfile.h"
#include "image/data.h"
#include "image/emit.h"
#include "image/model.h"
#include "tools/mkimage-description.h"
#include "tools/mkimage-selection.h"

enum { ENTRIES_MAX = 1 << 30 };

static const struct model_limits model_limits = { .inodes = ENTRIES_MAX, .entries = ENTRIES_MAX };

enum output { SEED, DATA, DIGESTS, OUTPUTS };

static const char *const output_names[OUTPUTS] = { "seed.img", "data", "digests" };

struct job {
	struct description description;
	struct outfile outputs[OUTPUTS];
	struct outfile *selections; /* of the layers; NULL: none have any */
	int directory_fd;
	struct model model;
	struct data *data;
	struct emit *emit;
	struct emit_result result;
	struct error error;
};

static int check_empty(struct job *job)
{
	const char *path = job->description.output;
	DIR *directory = opendir(path);
	const struct dirent *entry;
	bool is_empty = true;

	if (!directory)
		return error_set(&job->error, -errno, "%s: %s", path, strerror(errno));
	while ((entry = readdir(directory)))
		is_empty &= !strcmp(entry->d_name, ".") || !strcmp(entry->d_name, "..");
	closedir(directory);
	if (is_empty)
		return 0;
	error_set_hint(&job->error, "give an empty directory");
	return error_set(&job->error, -ENOTEMPTY, "%s is not empty", path);
}

static int open_output(struct job *job, struct outfile *output, const char *name)
{
	_cleanup_free_ char *path = NULL;
	int ret;

	if (asprintf(&path, "%s/%s", job->description.output, name) < 0) {
		path = NULL;
		return error_set(&job->error, -ENOMEM, "no memory");
	}
	ret = outfile_open(output, path, false);
	return ret ? error_set(&job->error, ret, "%s: cannot create it: %s", path, strerror(-ret)) :
		     0;
}

static int open_outputs(struct job *job)
{
	const char *path = job->description.output;
	int ret = check_empty(job);

	if (ret)
		return ret;
	job->directory_fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	if (job->directory_fd < 0)
		return error_set(&job->error, -errno, "%s: %s", path, strerror(errno));
	for (int i = 0; i < OUTPUTS && !ret; i++) {
		if (i != DATA || !job->description.in_layers)
			ret = open_output(job, &job->outputs[i], output_names[i]);
	}
	return ret;
}

static int open_image(struct job *job)
{
	const struct description *description = &job->description;
	const struct data_params data = {
		.fd = job->outputs[DATA].fd,
		.directory = description->output,
		.level = description->level,
		.max_inline = description->max_inline,
		.unit_bytes = description->unit_bytes,
		.threads = description->threads,
		.csum = description->csum,
		.in_layers = description->in_layers,
	};
	const struct emit_params emit = {
		.fd = job->outputs[SEED].fd,
		.label = description->label,
		.time = description->time_s,
		.csum = description->csum,
		.has_zstd = description->level != 0,
	};
	int ret = model_init(&job->model, &model_limits, &job->error);

	if (!ret)
		ret = data_open(&job->data, &data, &job->model, &job->error);
	return ret ?: emit_open(&job->emit, &emit, &job->error);
}

/*
 * The chain ID of the first layer is its diff ID; all others depend on the layers below. Where
 * there is no diff ID, the digest of what the subvolume shows takes its place.
 */
static int find_chain_id(struct layer *layer, const struct layer *below, const uint8_t *digest)
{
	char text[2 * DIGEST_TEXT_BYTES];
	size_t length;

	memcpy(layer->chain_id, digest, sizeof(layer->chain_id));
	if (!below)
		return 0;
	digest_format(below->chain_id, text);
	length = strlen(text);
	text[length++] = ' ';
	digest_format(digest, text + length);
	return EVP_Digest(text, strlen(text), layer->chain_id, NULL, EVP_sha256(), NULL) ? 0 :
											   -ENOMEM;
}

static int name_layer(struct layer *layer)
{
	char text[DIGEST_TEXT_BYTES];

	if (!layer->name)
		layer->name = strdup(digest_format(layer->chain_id, text));
	return layer->name ? 0 : -ENOMEM;
}

static int add_layer(struct job *job, size_t number)
{
	struct layer *layer = &job->description.layers[number];
	const struct data_counts *counts = data_counts(job->data);
	uint8_t digest[DATA_DIGEST_BYTES];
	int ret = 0;

	layer->data_offset = counts->object_bytes;
	layer->first_origin = counts->origins;
	if (number)
		ret = model_begin_layer(&job->model, &job->error);
	if (!ret)
		ret = layer->read(&job->model, data_sink(job->data), &layer->options,
				  &layer->report, &job->error);
	if (!ret)
		ret = data_drain(job->data, &job->error);
	if (!ret && job->description.in_layers)
		ret = data_end_layer(job->data, &job->error);
	if (!ret)
		ret = emit_layer(job->emit, &job->model, job->data, &layer->subvolume,
				 layer->is_tar ? NULL : digest, &job->error);
	if (ret)
		return ret;
	layer->data_bytes = counts->object_bytes - layer->data_offset;
	layer->origins = counts->origins - layer->first_origin;
	ret = find_chain_id(layer, number ? layer - 1 : NULL,
			    layer->is_tar ? layer->report.diff_id : digest);
	if (!ret)
		ret = name_layer(layer);
	if (ret)
		return error_set(&job->error, ret, "%s: no memory", layer->options.path);
	emit_name(job->emit, layer->subvolume, layer->name);
	return 0;
}

/* Reads all layers into a model of their own, to find what comes first in the data. */
static int collect_first(struct job *job, struct model *model)
{
	int ret = 0;

	for (size_t i = 0; i < job->description.layer_count && !ret; i++) {
		struct layer *layer = &job->description.layers[i];
		struct source_report report;

		if (i)
			ret = model_begin_layer(model, &job->error);
		if (!ret)
			ret = layer->read(model, data_sink(job->data), &layer->options, &report,
					  &job->error);
	}
	return ret;
}

static int place_first(struct job *job)
{
	const struct description *description = &job->description;
	struct first first;
	struct model model;
	int ret = model_init(&model, &model_limits, &job->error);

	if (ret)
		return ret;
	ret = first_open(&first, description->first, description->first_count, description->output);
	if (ret) {
		error_set_text(&job->error, "cannot prepare for what comes first: %s",
			       strerror(-ret));
	} else {
		data_collect(job->data, &first, &model);
		ret = collect_first(job, &model);
	}
	if (!ret)
		ret = data_place_first(job->data, &job->error);
	first_close(&first);
	model_deinit(&model);
	return ret;
}

static int write_digests(struct job *job)
{
	uint64_t bytes = data_counts(job->data)->digests * DATA_DIGEST_BYTES;
	uint8_t part[DATA_DIGEST_BYTES * 512];
	int ret = 0;

	for (uint64_t done = 0; done < bytes && !ret; done += sizeof(part)) {
		size_t length = bytes - done < sizeof(part) ? bytes - done : sizeof(part);

		ret = data_read_digests(job->data, done / DATA_DIGEST_BYTES, part, length);
		if (!ret)
			ret = write_full(job->outputs[DIGESTS].fd, part, length);
	}
	return ret;
}

/* Writes which bytes of its tar each layer's part of the data object consists of. */
static int write_selections(struct job *job)
{
	const struct description *description = &job->description;
	int ret = 0;

	job->selections = calloc(description->layer_count, sizeof(*job->selections));
	if (!job->selections)
		return error_set(&job->error, -ENOMEM, "no memory");
	for (size_t i = 0; i < description->layer_count; i++)
		job->selections[i] = OUTFILE_CLOSED;
	for (size_t i = 0; i < description->layer_count && !ret; i++) {
		const struct layer *layer = &description->layers[i];
		struct outfile *output = &job->selections[i];
		char name[64];

		if (!layer->data_bytes)
			continue;
		snprintf(name, sizeof(name), "selection.%zu", i);
		ret = open_output(job, output, name);
		if (!ret)
			ret = selection_write(output->fd, layer, description->unit_bytes, job->data,
					      &job->error);
	}
	return ret;
}

static int publish_one(struct outfile *output)
{
	return output->fd < 0 ? 0 : outfile_publish(output, false);
}

/* Gives all files their names, or none. */
static int publish(struct job *job)
{
	size_t layers = job->selections ? job->description.layer_count : 0, done = 0;
	int ret = 0;

	for (; done < OUTPUTS + layers && !ret; done++)
		ret = publish_one(done < OUTPUTS ? &job->outputs[done] :
						   &job->selections[done - OUTPUTS]);
	if (!ret)
		return 0;
	/* The last one has failed. */
	for (size_t i = 0; i < done - 1; i++) {
		char name[64];

		snprintf(name, sizeof(name), "selection.%zu", i - OUTPUTS);
		unlinkat(job->directory_fd, i < OUTPUTS ? output_names[i] : name, 0);
	}
	return ret;
}

static int build(struct job *job)
{
	int ret = open_outputs(job);

	if (!ret)
		ret = open_image(job);
	if (!ret && job->description.first_count)
		ret = place_first(job);
	for (size_t i = 0; i < job->description.layer_count && !ret; i++)
		ret = add_layer(job, i);
	if (!ret)
		ret = data_finish(job->data, &job->error);
	if (!ret)
		ret = emit_finish(job->emit, job->data, &job->result, &job->error);
	if (!ret && job->description.in_layers)
		ret = write_selections(job);
	if (ret)
		return ret;
	if (ftruncate(job->outputs[SEED].fd, (off_t)job->result.local_bytes))
		ret = -errno;
	if (!ret)
		ret = write_digests(job);
	if (ret)
		error_set_text(&job->error, "%s: cannot write it: %s", job->description.output,
			       strerror(-ret));
	return ret;
}

static json_t *describe_layer(const struct layer *layer)
{
	char diff_id[DIGEST_TEXT_BYTES], chain_id[DIGEST_TEXT_BYTES];

	return json_pack("{ss ss sI sI ss* ss sI sI sI}", "path", layer->options.path, "name",
			 layer->name, "subvolume", (json_int_t)layer->subvolume, "entries",
			 (json_int_t)layer->report.entries, "diff_id",
			 layer->is_tar ? digest_format(layer->report.diff_id, diff_id) : NULL,
			 "chain_id", digest_format(layer->chain_id, chain_id), "stream_bytes",
			 (json_int_t)layer->report.stream_bytes, "data_offset",
			 (json_int_t)layer->data_offset, "data_bytes",
			 (json_int_t)layer->data_bytes);
}

static json_t *describe_data(const struct data_counts *counts)
{
	return json_pack("{sI sI sI sI sI sI sI sI sI}", "first_bytes",
			 (json_int_t)counts->first_bytes, "extents", (json_int_t)counts->extents,
			 "compressed_extents", (json_int_t)counts->compressed, "content_bytes",
			 (json_int_t)counts->content_bytes, "inline_files",
			 (json_int_t)counts->inline_files, "inline_bytes",
			 (json_int_t)counts->inline_bytes, "shared_extents",
			 (json_int_t)counts->shared, "shared_bytes",
			 (json_int_t)counts->shared_bytes, "units", (json_int_t)counts->digests);
}

static json_t *describe(const struct job *job)
{
	const struct description *description = &job->description;
	const struct emit_result *result = &job->result;
	char fsid[UUID_STR_LEN];
	json_t *layers = json_array();

	uuid_unparse_lower(result->fsid, fsid);
	for (size_t i = 0; i < description->layer_count; i++)
		json_array_append_new(layers, describe_layer(&description->layers[i]));
	return json_pack("{ss sI sI sI sI sI ss so sI so}", "fsid", fsid, "device_bytes",
			 (json_int_t)result->device_bytes, "local_bytes",
			 (json_int_t)result->local_bytes, "metadata_bytes",
			 (json_int_t)result->metadata_bytes, "data_bytes",
			 (json_int_t)data_counts(job->data)->object_bytes, "unit",
			 (json_int_t)description->unit_bytes, "checksum", description->csum->name,
			 "layers", layers, "inodes", (json_int_t)job->model.live_inodes, "counts",
			 describe_data(data_counts(job->data)));
}

static void job_deinit(struct job *job)
{
	emit_close(job->emit);
	data_close(job->data);
	model_deinit(&job->model);
	for (int i = 0; i < OUTPUTS; i++)
		outfile_close(&job->outputs[i]);
	for (size_t i = 0; job->selections && i < job->description.layer_count; i++)
		outfile_close(&job->selections[i]);
	free(job->selections);
	cleanup_close(&job->directory_fd);
	description_deinit(&job->description);
}

static int report_error(const struct job *job, int status)
{
	msg_error_of(&job->error);
	return status;
}

static int make_image(struct job *job)
{
	int ret = description_read(&job->description, stdin, &job->error);

	if (ret) {
		msg_error("the description: %s", job->error.text);
		if (*job->error.hint)
			msg_hint("%s", job->error.hint);
		return EXIT_USAGE;
	}
	if (build(job))
		return report_error(job, EXIT_FAILED);
	ret = publish(job);
	if (ret) {
		error_set_text(&job->error, "%s: cannot put the files in place: %s",
			       job->description.output, strerror(-ret));
		return report_error(job, EXIT_FAILED);
	}
	if (json_text_print(describe(job)))
		return msg_fail(EXIT_FAILED, "%s is complete, but printing the report failed",
				job->description.output);
	return EXIT_OK;
}

static const char help_text[] =
	"Usage: " MKIMAGE_PROGRAM " < DESCRIPTION\n"
	"Make a sealed image of directories and tars. The description and the report on\n"
	"standard output are JSON; docs/design/images.md describes them. Needs no\n"
	"privileges, but to read what goes into the image.\n"
	"\n"
	"  --help, --version\n"
	"\n"
	"Exit status: 0 done, 1 failed, 2 the description is wrong.\n";

int main(int argc, char **argv)
{
	struct job job = { .directory_fd = -1 };
	int status;

	message_init(MKIMAGE_PROGRAM);
	/* Report a limit on file sizes like any other failure. */
	signal(SIGXFSZ, SIG_IGN);
	if (answer_options(argc, argv, help_text, &status))
		return status;
	if (argc != 1)
		return usage_error("unexpected", argv[1]);
	for (int i = 0; i < OUTPUTS; i++)
		job.outputs[i] = OUTFILE_CLOSED;
	status = make_image(&job);
	job_deinit(&job);
	return status;
}
