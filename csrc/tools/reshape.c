/* SPDX-License-Identifier: MIT */
/* btrfs-ublk-reshape: makes changes to an unmounted btrfs that no kernel interface offers. */
#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include <string.h>
#include <uuid/uuid.h>

#include "base/cleanup.h"
#include "base/json_text.h"
#include "base/message.h"
#include "base/size.h"
#include "btrfs/flip.h"
#include "btrfs/stretch.h"
#include "btrfs/super.h"
#include "tools/open_image.h"

#define PROGRAM "btrfs-ublk-reshape"

static const char usage_text[] =
	"Usage: " PROGRAM " stretch --offset SIZE --length SIZE IMAGE\n"
	"       " PROGRAM " seed --inode NUMBER [--dry-run] [--json] IMAGE\n"
	"Move the empty data chunk of a new btrfs to --offset, and stretch it; or make a\n"
	"seed: turn the preallocated extents of the file with this inode number into regular\n"
	"ones, and set the SEEDING flag; killed, run it again. All that has to hold is checked\n"
	"before the first byte is written.\n"
	"Exit status: 0, 1 on failure, 2 if the arguments or IMAGE are refused; nothing has\n"
	"been changed then.\n";

struct options {
	const char *path;
	uint64_t offset;
	uint64_t length;
	uint64_t inode;
	bool dry_run;
	bool json;
	bool seed; /* else stretch */
};

/* Returns the end of what must be stored: chunks of metadata, and mirrors of the superblock. */
static uint64_t local_end(const struct reader *reader)
{
	unsigned mirrors = super_mirror_count(reader->device_bytes);
	uint64_t end = super_mirror_offset(mirrors ? mirrors - 1 : 0) + SUPER_RESERVED_BYTES;

	for (size_t i = 0; i < reader->chunks.count; i++) {
		const struct chunk *chunk = &reader->chunks.chunks[i];

		for (unsigned j = 0; j < chunk->stripe_count; j++) {
			if ((chunk->type & CHUNK_TYPE_MASK) != CHUNK_DATA &&
			    chunk->stripes[j] + chunk->length > end)
				end = chunk->stripes[j] + chunk->length;
		}
	}
	return end < reader->device_bytes ? end : reader->device_bytes;
}

static int print_seed(const struct options *options, const struct reader *reader,
		      const struct flip *flip)
{
	char fsid[UUID_STR_LEN], device_uuid[UUID_STR_LEN];
	uint64_t chunks = 0, longest = 0;
	json_t *json;

	if (!options->json)
		return 0;
	for (size_t i = 0; i < reader->chunks.count; i++) {
		const struct chunk *chunk = &reader->chunks.chunks[i];

		if ((chunk->type & CHUNK_TYPE_MASK) != CHUNK_DATA)
			continue;
		chunks++;
		longest = chunk->length > longest ? chunk->length : longest;
	}
	uuid_unparse_lower(reader->super.fsid, fsid);
	uuid_unparse_lower(reader->super.device.uuid, device_uuid);
	/* A label may be any bytes, and JSON is Unicode, so other labels are left out. */
	json = json_pack("{ss ss so* sI sI sI sI sI sI sI sI sI sb}", "fsid", fsid, "device_uuid",
			 device_uuid, "label", json_string(reader->super.label), "device_bytes",
			 (json_int_t)reader->device_bytes, "metadata_bytes",
			 (json_int_t)flip->metadata_bytes, "local_bytes",
			 (json_int_t)local_end(reader), "chunks", (json_int_t)chunks, "chunk_bytes",
			 (json_int_t)longest, "inode", (json_int_t)flip->inode, "size",
			 (json_int_t)flip->file_bytes, "extents", (json_int_t)flip->extents,
			 "flipped_extents", (json_int_t)flip->prealloc_extents, "dry_run",
			 (int)options->dry_run);
	return json_text_print(json);
}

static int make_seed(const struct options *options, struct reader *reader, int fd)
{
	struct flip flip = { .inode = options->inode };

	if (flip_check(reader, &flip))
		return msg_fail(EXIT_USAGE, "%s: %s", options->path, reader->error);
	if (!options->dry_run && flip_write(reader, fd, &flip)) {
		msg_error("%s: %s", options->path, reader->error);
		msg_hint("run it again: it goes on where it was");
		return EXIT_FAILED;
	}
	if (print_seed(options, reader, &flip))
		return msg_fail(EXIT_FAILED, "printing the result failed");
	return EXIT_OK;
}

static int stretch(const struct options *options, struct reader *reader, int fd)
{
	int ret = stretch_data_chunk(reader, fd, options->offset, options->length);

	if (!ret)
		return EXIT_OK;
	msg_error("%s: %s", options->path, reader->error);
	if (ret == -EINVAL || ret == -EUCLEAN || ret == -ENOENT || ret == -ENOTSUP)
		return EXIT_USAGE;
	msg_hint("run mkfs.btrfs on it again: the file system on it may be damaged");
	return EXIT_FAILED;
}

static int reshape(const struct options *options)
{
	_cleanup_close_ int fd = open_exclusive(options->path);
	struct reader reader;
	int status;

	if (fd < 0)
		return EXIT_USAGE;
	if (reader_open(&reader, fd))
		return msg_fail(EXIT_USAGE, "%s: %s", options->path, reader.error);
	status = (options->seed ? make_seed : stretch)(options, &reader, fd);
	reader_close(&reader);
	return status;
}

static int parse_number(const char *option, const char *text, uint64_t *value)
{
	if (!size_parse(text, value))
		return 0;
	return msg_fail(-EINVAL, "--%s: \"%s\" is not a number", option, text);
}

enum option_id { OPTION_OFFSET, OPTION_LENGTH, OPTION_INODE, OPTION_COUNT };
static const char *const option_names[OPTION_COUNT] = { "offset", "length", "inode" };

/* Checks that the verb has all the options it needs, and no other. */
static int check_usage(struct options *options, const char *verb, unsigned given)
{
	unsigned needed;

	options->seed = !strcmp(verb, "seed");
	if (!options->seed && strcmp(verb, "stretch") != 0)
		return msg_fail(-EINVAL, "there is no \"%s\"", verb);
	needed = options->seed ? 1u << OPTION_INODE : 1u << OPTION_OFFSET | 1u << OPTION_LENGTH;
	for (unsigned i = 0; i < OPTION_COUNT; i++) {
		if ((needed ^ given) & 1u << i)
			return msg_fail(-EINVAL, "%s %s --%s", verb,
					needed & 1u << i ? "needs" : "has no", option_names[i]);
	}
	if (!options->seed && (options->dry_run || options->json))
		return msg_fail(-EINVAL, "%s has no --%s", verb,
				options->json ? "json" : "dry-run");
	return 0;
}

int main(int argc, char **argv)
{
	static const struct option long_options[] = {
		{ "offset", required_argument, NULL, OPTION_OFFSET },
		{ "length", required_argument, NULL, OPTION_LENGTH },
		{ "inode", required_argument, NULL, OPTION_INODE },
		{ "dry-run", no_argument, NULL, 'n' },
		{ "json", no_argument, NULL, 'j' },
		{ "help", no_argument, NULL, 'h' },
		{ "version", no_argument, NULL, 'V' },
		{ 0 },
	};
	struct options options = { 0 };
	uint64_t *const values[OPTION_COUNT] = { &options.offset, &options.length, &options.inode };
	unsigned given = 0;
	int option;

	message_init(PROGRAM);
	while ((option = getopt_long(argc, argv, "h", long_options, NULL)) != -1) {
		switch (option) {
		case OPTION_OFFSET:
		case OPTION_LENGTH:
		case OPTION_INODE:
			if (parse_number(option_names[option], optarg, values[option]))
				return EXIT_USAGE;
			given |= 1u << option;
			break;
		case 'n':
			options.dry_run = true;
			break;
		case 'j':
			options.json = true;
			break;
		case 'h':
			return print_help(usage_text);
		case 'V':
			return print_version();
		default:
			return hint_usage();
		}
	}
	if (argc - optind != 2)
		return usage_error("a verb and one IMAGE are needed, and nothing else", NULL);
	if (check_usage(&options, argv[optind], given))
		return hint_usage();
	options.path = argv[optind + 1];
	return reshape(&options);
}
