/* SPDX-License-Identifier: MIT */
/*
 * image-shell [--max-bytes N] [--max-inodes N] KIND:PATH...: reads layers into a model, and prints
 * it after each of them as a line of JSON. KIND is "directory", "tar" or "oci", or
 * "oci=DIFF_ID". Names are in hexadecimal digits, as they may be any bytes.
 */
#include <errno.h>
#include <jansson.h>
#include <openssl/evp.h>
#include <stdlib.h>
#include <string.h>

#include "base/cleanup.h"
#include "base/list.h"
#include "base/message.h"
#include "image/source.h"

enum { BLOCK_BYTES = 4096 };

/*
 * Keeps of each file which ranges were handed on as data, and a SHA-256 over its blocks that are
 * not all zeros, each with its offset in front, so that it does not depend on holes.
 */
struct recorder {
	struct content_sink sink;
	json_t *files; /* inode -> {"ranges": [[offset, length]...], "sha256": ...} */
	json_t *ranges;
	uint32_t inode;
	uint64_t bytes, at, start; /* of the file; where it is; where the data began */
	EVP_MD_CTX *digest;
	uint8_t block[BLOCK_BYTES];
};

static void to_hex(const void *bytes, size_t length, char *text)
{
	for (size_t i = 0; i < length; i++)
		sprintf(text + 2 * i, "%02x", ((const uint8_t *)bytes)[i]);
	text[2 * length] = '\0';
}

static json_t *hex(const void *bytes, size_t length)
{
	_cleanup_free_ char *text = malloc(2 * length + 1);

	to_hex(bytes, length, text);
	return json_string(text);
}

static void end_range(struct recorder *recorder)
{
	if (recorder->start < recorder->at)
		json_array_append_new(recorder->ranges,
				      json_pack("[I, I]", (json_int_t)recorder->start,
						(json_int_t)(recorder->at - recorder->start)));
	recorder->start = recorder->at;
}

/* `at` is behind the block. */
static void end_block(struct recorder *recorder, uint64_t at)
{
	static const uint8_t zeros[BLOCK_BYTES];
	uint64_t offset = at - BLOCK_BYTES;

	if (!memcmp(recorder->block, zeros, BLOCK_BYTES))
		return;
	EVP_DigestUpdate(recorder->digest, &offset, sizeof(offset));
	EVP_DigestUpdate(recorder->digest, recorder->block, BLOCK_BYTES);
	memset(recorder->block, 0, BLOCK_BYTES);
}

static int record_begin(struct content_sink *sink, uint32_t inode, uint64_t bytes,
			struct error *error)
{
	struct recorder *recorder = container_of(sink, struct recorder, sink);

	(void)error;
	recorder->inode = inode;
	recorder->bytes = bytes;
	recorder->at = recorder->start = 0;
	recorder->ranges = json_array();
	EVP_DigestInit_ex(recorder->digest, EVP_sha256(), NULL);
	return 0;
}

static int record_data(struct content_sink *sink, const void *bytes, size_t length,
		       struct error *error)
{
	struct recorder *recorder = container_of(sink, struct recorder, sink);

	(void)error;
	if (!length)
		abort();
	while (length) {
		size_t place = recorder->at % BLOCK_BYTES;
		size_t part = BLOCK_BYTES - place < length ? BLOCK_BYTES - place : length;

		memcpy(recorder->block + place, bytes, part);
		recorder->at += part;
		bytes = (const uint8_t *)bytes + part;
		length -= part;
		if (recorder->at % BLOCK_BYTES == 0)
			end_block(recorder, recorder->at);
	}
	return 0;
}

static int record_hole(struct content_sink *sink, uint64_t length, struct error *error)
{
	struct recorder *recorder = container_of(sink, struct recorder, sink);
	uint64_t to_end = BLOCK_BYTES - recorder->at % BLOCK_BYTES;

	(void)error;
	if (!length)
		abort();
	end_range(recorder);
	if (to_end < BLOCK_BYTES && length >= to_end)
		end_block(recorder, recorder->at + to_end);
	recorder->at += length;
	recorder->start = recorder->at;
	return 0;
}

static int record_end(struct content_sink *sink, struct error *error)
{
	struct recorder *recorder = container_of(sink, struct recorder, sink);
	uint64_t rest = recorder->at % BLOCK_BYTES;
	uint8_t digest[32];
	char key[16];

	(void)error;
	end_range(recorder);
	if (rest)
		end_block(recorder, recorder->at + BLOCK_BYTES - rest);
	/* A source has to see to that. */
	if (recorder->at != recorder->bytes)
		abort();
	EVP_DigestFinal_ex(recorder->digest, digest, NULL);
	snprintf(key, sizeof(key), "%u", recorder->inode);
	json_object_set_new(recorder->files, key,
			    json_pack("{s:O, s:o}", "ranges", recorder->ranges, "sha256",
				      hex(digest, sizeof(digest))));
	json_decref(recorder->ranges);
	recorder->ranges = NULL;
	return 0;
}

static const struct content_sink_ops recorder_ops = {
	.begin = record_begin,
	.data = record_data,
	.hole = record_hole,
	.end = record_end,
};

static json_t *attributes_of(const struct model *model, const struct model_inode *inode)
{
	json_t *all = json_object();
	uint32_t place = inode->attributes;
	struct model_attribute attribute;

	while (model_attribute_next(model, &place, &attribute)) {
		_cleanup_free_ char *name = malloc(2 * (size_t)attribute.name_bytes + 1);

		to_hex(attribute.name, attribute.name_bytes, name);
		json_object_set_new(all, name, hex(attribute.value, attribute.value_bytes));
	}
	return all;
}

static json_t *names_of(const struct model *model, const struct model_inode *inode)
{
	json_t *names = json_array();

	for (uint32_t at = inode->name; at; at = model_entry(model, at)->next_of_inode) {
		const struct model_entry *entry = model_entry(model, at);

		json_array_append_new(names,
				      json_pack("[I, o, I]", (json_int_t)entry->parent,
						hex(model_name(model, entry), entry->name_bytes),
						(json_int_t)entry->index));
	}
	return names;
}

static json_t *dump_inode(const struct model *model, const struct recorder *recorder,
			  uint32_t number)
{
	const struct model_inode *inode = model_inode(model, number);
	json_t *object = json_pack("{s:I, s:i, s:I, s:I, s:I, s:i, s:I, s:I, s:o, s:o}", "inode",
				   (json_int_t)number, "mode", (int)inode->mode, "uid",
				   (json_int_t)inode->uid, "gid", (json_int_t)inode->gid, "mtime_s",
				   (json_int_t)inode->mtime_s, "mtime_ns", (int)inode->mtime_ns,
				   "links", (json_int_t)inode->links, "bytes",
				   (json_int_t)inode->bytes, "names", names_of(model, inode),
				   "xattrs", attributes_of(model, inode));
	char key[16];

	snprintf(key, sizeof(key), "%u", number);
	if (json_object_get(recorder->files, key))
		json_object_set(object, "data", json_object_get(recorder->files, key));
	if (S_ISLNK(inode->mode))
		json_object_set_new(object, "target",
				    hex(model_target(model, inode), inode->bytes));
	if (S_ISCHR(inode->mode) || S_ISBLK(inode->mode))
		json_object_set_new(object, "device",
				    json_pack("[I, I]", (json_int_t)inode->device.major,
					      (json_int_t)inode->device.minor));
	return object;
}

/* What a model promises of itself. */
static void check(const struct model *model)
{
	uint64_t links = 1, entries = 0, live = 0;

	for (uint32_t number = 0; (number = model_next(model, number));) {
		const struct model_inode *inode = model_inode(model, number);
		uint64_t bytes = 0;

		live++;
		for (uint32_t at = inode->name; at; at = model_entry(model, at)->next_of_inode) {
			const struct model_entry *entry = model_entry(model, at);

			links++;
			if (entry->inode != number ||
			    model_find(model, entry->parent, model_name(model, entry),
				       entry->name_bytes) != at)
				abort();
		}
		if (!S_ISDIR(inode->mode))
			continue;
		for (uint32_t at = inode->directory.first, index = 1; at;
		     at = model_entry(model, at)->next) {
			const struct model_entry *entry = model_entry(model, at);

			if (entry->parent != number || entry->index <= index ||
			    !model_inode(model, entry->inode)->links)
				abort();
			index = entry->index;
			bytes += entry->name_bytes;
			entries++;
		}
		if (bytes != inode->bytes)
			abort();
	}
	if (links != entries + 1 || live != model->live_inodes)
		abort();
}

static void dump(const struct model *model, const struct recorder *recorder,
		 const struct source_report *report)
{
	json_t *inodes = json_array();
	json_t *object;

	check(model);
	for (uint32_t number = 0; (number = model_next(model, number));)
		json_array_append_new(inodes, dump_inode(model, recorder, number));
	object = json_pack("{s:o, s:I, s:I, s:o}", "inodes", inodes, "entries",
			   (json_int_t)report->entries, "stream_bytes",
			   (json_int_t)report->stream_bytes, "diff_id",
			   hex(report->diff_id, sizeof(report->diff_id)));
	json_dumpf(object, stdout, JSON_COMPACT);
	putchar('\n');
	json_decref(object);
}

static int read_layer(struct model *model, struct recorder *recorder, char *layer,
		      struct source_options options, struct source_report *report,
		      struct error *error)
{
	char *path = strchr(layer, ':'), *diff_id;
	uint8_t digest[DIFF_ID_BYTES];

	if (!path)
		return error_set(error, -EINVAL, "%s: it must be KIND:PATH", layer);
	*path++ = '\0';
	options.path = path;
	if (!strcmp(layer, "directory"))
		return source_read_directory(model, &recorder->sink, &options, report, error);
	diff_id = strchr(layer, '=');
	if (diff_id) {
		*diff_id++ = '\0';
		for (int i = 0; i < DIFF_ID_BYTES; i++) {
			char byte[3] = { diff_id[2 * i], diff_id[2 * i + 1], 0 };

			digest[i] = (uint8_t)strtoul(byte, NULL, 16);
		}
		options.diff_id = digest;
	}
	options.is_oci_layer = !strcmp(layer, "oci");
	return source_read_tar(model, &recorder->sink, &options, report, error);
}

int main(int argc, char **argv)
{
	struct recorder recorder = { .sink.ops = &recorder_ops, .files = json_object() };
	struct model_limits limits = { UINT32_MAX, UINT32_MAX };
	struct source_options options = { 0 };
	struct source_report report;
	struct error error = { 0 };
	struct model model;
	int err, at = 1;

	message_init("image-shell");
	for (; at + 1 < argc && argv[at][0] == '-'; at += 2)
		if (!strcmp(argv[at], "--max-bytes"))
			options.stream_bytes_max = strtoull(argv[at + 1], NULL, 0);
		else
			limits.inodes = (uint32_t)strtoul(argv[at + 1], NULL, 0);
	recorder.digest = EVP_MD_CTX_new();
	err = model_init(&model, &limits, &error);
	for (int first = at; !err && at < argc; at++) {
		if (at > first)
			err = model_begin_layer(&model, &error);
		if (!err)
			err = read_layer(&model, &recorder, argv[at], options, &report, &error);
		if (!err)
			dump(&model, &recorder, &report);
	}
	if (err) {
		msg_error("%s", error.text);
		if (*error.hint)
			msg_hint("%s", error.hint);
	}
	model_deinit(&model);
	json_decref(recorder.ranges);
	json_decref(recorder.files);
	EVP_MD_CTX_free(recorder.digest);
	return err ? EXIT_FAILED : EXIT_OK;
}
