/* SPDX-License-Identifier: MIT */
#include "tools/mkseed-options.h"

#include <errno.h>
#include <getopt.h>
#include <jansson.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <uuid/uuid.h>

#include "base/message.h"
#include "base/size.h"

#define PROGRAM MKSEED_PROGRAM
#define DEFAULT_NAME ".btrfs-ublk-virtual-data"

static const char help_text[] =
	"Usage: " PROGRAM " [OPTION]... OUTPUT\n"
	"Write a btrfs seed, and print a line of JSON. Options, but for --metadata-profile\n"
	"single|dup and --inherit-nodatasum on|off, are those of `btrfs-ublk seed create`,\n"
	"whose --help explains them: --virtual-data-size, --virtual-data-filename,\n"
	"--chunk-size, --label, --fsid, --device-uuid, --time, --metadata-only, --force.\n"
	"Exit status: 0 done, 1 failed, 2 wrong usage. OUTPUT appears when complete.\n";

static int parse_size(const char *option, const char *text, void *bytes)
{
	int ret = size_parse(text, bytes);

	if (!ret)
		return 0;
	if (ret == -ERANGE)
		msg_error("%s: %s is more than 64 bits hold", option, text);
	else
		msg_error("%s: \"%s\" is not a size", option, text);
	msg_hint("give a number of bytes, or one with a binary unit: 4096K, 275G, 4E");
	return ret;
}

static int parse_uuid(const char *option, const char *text, void *uuid)
{
	if (uuid_parse(text, uuid) || uuid_is_null(uuid)) {
		msg_error("%s: \"%s\" is not a UUID that can be used", option, text);
		msg_hint("it looks like 01234567-89ab-cdef-0123-456789abcdef and is not all zero");
		return -EINVAL;
	}
	return 0;
}

static int parse_time(const char *option, const char *text, void *seconds)
{
	char *end;

	errno = 0;
	*(int64_t *)seconds = strtoll(text, &end, 10);
	if (errno || end == text || *end || *text < '0' || *text > '9') {
		msg_error("%s: \"%s\" is not a time", option, text);
		msg_hint("give the seconds since 1970, as `date +%%s` prints them");
		return -EINVAL;
	}
	return 0;
}

/* Parses one of two words. Returns whether it is the second one. */
static int parse_choice(const char *option, const char *text, const char *const words[2],
			bool *second)
{
	*second = !strcmp(text, words[1]);
	if (*second || !strcmp(text, words[0]))
		return 0;
	msg_error("%s: \"%s\" is neither %s nor %s", option, text, words[0], words[1]);
	hint_usage();
	return -EINVAL;
}

static int parse_profile(const char *option, const char *text, void *dup)
{
	return parse_choice(option, text, (const char *const[]){ "single", "dup" }, dup);
}

static int parse_switch(const char *option, const char *text, void *on)
{
	return parse_choice(option, text, (const char *const[]){ "off", "on" }, on);
}

static int take_text(const char *option, const char *text, void *field)
{
	*(const char **)field = text;
	return 0;
}

static int set(const char *option, const char *text, void *flag)
{
	*(bool *)flag = true;
	return 0;
}

/* Names and labels are shown as JSON, and on terminals. */
static bool is_utf8(const char *text)
{
	json_t *json = json_string(text);

	json_decref(json);
	return json != NULL;
}

static int check_name(const char *name)
{
	if (!*name)
		msg_error("--virtual-data-filename: the name is empty");
	else if (strchr(name, '/'))
		msg_error("--virtual-data-filename: \"%s\" contains a slash", name);
	else if (!strcmp(name, ".") || !strcmp(name, ".."))
		msg_error("--virtual-data-filename: \"%s\" names a directory", name);
	else if (strlen(name) > NAME_MAX_BYTES)
		msg_error("--virtual-data-filename: the name has %zu bytes, btrfs allows %d",
			  strlen(name), NAME_MAX_BYTES);
	else if (!is_utf8(name))
		msg_error("--virtual-data-filename: the name is not valid UTF-8");
	else if (!strcmp(name, SEED_SUBVOLUME_NAME))
		msg_error("--virtual-data-filename: \"%s\" is the subvolume beside it", name);
	else
		return 0;
	msg_hint("give the name of a file, such as " DEFAULT_NAME);
	return -EINVAL;
}

static int check_label(const char *label)
{
	if (strlen(label) >= LABEL_BYTES)
		msg_error("--label: it has %zu bytes, btrfs allows %d", strlen(label),
			  LABEL_BYTES - 1);
	else if (strchr(label, '\n'))
		msg_error("--label: it contains a line break");
	else if (!is_utf8(label))
		msg_error("--label: it is not valid UTF-8");
	else
		return 0;
	msg_hint("give a shorter one, of one line, or none");
	return -EINVAL;
}

static int check_virtual_size(uint64_t bytes)
{
	char text[SIZE_TEXT_BYTES];

	if (bytes % BLOCK_BYTES) {
		msg_error("--virtual-data-size: %llu bytes is not a multiple of %u",
			  (unsigned long long)bytes, BLOCK_BYTES);
		msg_hint("btrfs stores data in blocks of that size; the next one is %llu",
			 (unsigned long long)(bytes - bytes % BLOCK_BYTES + BLOCK_BYTES));
	} else if (bytes < SEED_VIRTUAL_MIN_BYTES) {
		msg_error("--virtual-data-size: %s is too small", size_format(bytes, text));
		msg_hint("the smallest size is %s", size_format(SEED_VIRTUAL_MIN_BYTES, text));
	} else if (bytes > SEED_VIRTUAL_MAX_BYTES) {
		msg_error("--virtual-data-size: %llu bytes (%s) is too large, the limit is %llu",
			  (unsigned long long)bytes, size_format(bytes, text),
			  (unsigned long long)SEED_VIRTUAL_MAX_BYTES);
		msg_hint("Linux ends devices before 8 EiB, as offsets are signed 64-bit numbers; "
			 "512 GiB precede the virtual data, and chunks end on 4 GiB");
	} else {
		return 0;
	}
	return -EINVAL;
}

static int check_chunk_size(const struct seed *seed)
{
	uint64_t bytes = seed->chunk_bytes;

	if (!bytes || bytes % SEED_CHUNK_STEP_BYTES || bytes > CHUNK_LENGTH_MAX) {
		msg_error("--chunk-size: %llu bytes is not a multiple of 4 GiB up to 255 TiB",
			  (unsigned long long)bytes);
		msg_hint("kernels since 6.4 refuse chunks of 256 TiB, and scrub reads virtual "
			 "data unless chunks end on 4 GiB; 255T suits most");
		return -EINVAL;
	}
	if (seed_chunk_count(seed->virtual_bytes, bytes) > SEED_CHUNKS_MAX) {
		msg_error("--chunk-size: this makes %llu chunks, the limit is %u",
			  (unsigned long long)seed_chunk_count(seed->virtual_bytes, bytes),
			  SEED_CHUNKS_MAX);
		msg_hint("each chunk slows mounting; choose longer ones");
		return -EINVAL;
	}
	return 0;
}

#define FIELD(name) offsetof(struct options, name)

static const struct {
	const char *name;
	int (*parse)(const char *option, const char *text, void *field);
	size_t field;
} rows[] = {
	{ "--virtual-data-size", parse_size, FIELD(seed.virtual_bytes) },
	{ "--virtual-data-filename", take_text, FIELD(seed.virtual_name) },
	{ "--chunk-size", parse_size, FIELD(seed.chunk_bytes) },
	{ "--metadata-profile", parse_profile, FIELD(seed.metadata_dup) },
	{ "--inherit-nodatasum", parse_switch, FIELD(seed.inherit_nodatasum) },
	{ "--label", take_text, FIELD(seed.label) },
	{ "--fsid", parse_uuid, FIELD(seed.fsid) },
	{ "--device-uuid", parse_uuid, FIELD(seed.device_uuid) },
	{ "--time", parse_time, FIELD(seed.time) },
	{ "--metadata-only", set, FIELD(metadata_only) },
	{ "--force", set, FIELD(force) },
};

/* NB: beyond what a byte holds, as getopt tells unknown short options by their letter. */
enum { ROWS = sizeof(rows) / sizeof(*rows), FIRST = 256, HELP = FIRST + ROWS, VERSION };

int options_parse(struct options *options, int argc, char **argv)
{
	struct option long_options[ROWS + 3] = {
		[ROWS] = { "help", no_argument, NULL, HELP },
		{ "version", no_argument, NULL, VERSION },
	};
	struct seed *seed = &options->seed;
	int id;

	for (int i = 0; i < ROWS; i++)
		long_options[i] = (struct option){
			.name = rows[i].name + strlen("--"),
			.has_arg = rows[i].parse == set ? no_argument : required_argument,
			.val = FIRST + i,
		};
	*options = (struct options){
		.seed = { .virtual_bytes = EIB(4),
			  .chunk_bytes = CHUNK_LENGTH_MAX,
			  .virtual_name = DEFAULT_NAME,
			  .label = "",
			  .time = -1 },
	};
	while ((id = getopt_long(argc, argv, "", long_options, NULL)) >= 0) {
		if (id == HELP)
			return print_help(help_text);
		if (id == VERSION)
			return print_version();
		if (id == '?') /* getopt has printed the error */
			return hint_usage();
		if (rows[id - FIRST].parse(rows[id - FIRST].name, optarg,
					   (char *)options + rows[id - FIRST].field))
			return EXIT_USAGE;
	}
	if (argc - optind > 1)
		return usage_error("one OUTPUT only; unexpected", argv[optind + 1]);
	if (argc - optind != 1 || !*argv[optind])
		return usage_error("OUTPUT is missing", NULL);
	options->output = argv[optind];
	if (check_name(seed->virtual_name) || check_label(seed->label) ||
	    check_virtual_size(seed->virtual_bytes) || check_chunk_size(seed))
		return EXIT_USAGE;
	return -1;
}

int options_fill_identity(struct options *options)
{
	const char *epoch = getenv("SOURCE_DATE_EPOCH");
	struct seed *seed = &options->seed;

	if (seed->time < 0 && epoch && *epoch) {
		if (parse_time("SOURCE_DATE_EPOCH", epoch, &seed->time))
			return -EINVAL;
	} else if (seed->time < 0) {
		seed->time = time(NULL);
	}
	if (uuid_is_null(seed->fsid))
		uuid_generate_random(seed->fsid);
	/* Derive the UUIDs from the fsid, so that they differ from each other and between seeds. */
	if (uuid_is_null(seed->device_uuid))
		uuid_generate_sha1(seed->device_uuid, seed->fsid, "device", 6);
	uuid_generate_sha1(seed->chunk_tree_uuid, seed->fsid, "chunk-tree", 10);
	uuid_generate_sha1(seed->top_uuid, seed->fsid, "top-level", 9);
	uuid_generate_sha1(seed->subvolume_uuid, seed->fsid, "subvolume", 9);
	return 0;
}
