/* SPDX-License-Identifier: MIT */
/*
 * An option is a row of `table` with its help, and perhaps a function that takes its argument;
 * nothing else has to name it.
 */
#include "server/options.h"

#include <errno.h>
#include <getopt.h>
#include <sched.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/sysinfo.h>
#include <unistd.h>

#include "base/cleanup.h"
#include "base/error.h"
#include "base/json_text.h"
#include "base/message.h"
#include "base/size.h"
#include "fetch/mirror/via.h"
#include "server/frontend/ublk_features.h"

enum {
	MAX_DEPTH = 1024,
	MAX_NUMBER = 1 << 20, /* of a device or descriptor */
	MIN_IO_BYTES = 64 << 10,
	MAX_IO_BYTES = 32 << 20,
	DEFAULT_QUEUES = 4, /* unless there are fewer CPUs */
};

struct row {
	const char *name;
	const char *argument; /* its name in the help; NULL: the option takes none */
	/*
	 * Returns 0, or -EINVAL after a message. NULL: `at` is where a number is, that of a device
	 * or descriptor, or a bool where the option has no argument.
	 */
	int (*take)(const char *text, struct server_options *options);
	size_t at;
	const char *help; /* lines of at most 60 characters */
};

#define OPTION(member) NULL, offsetof(struct server_options, member)

static int take_unsigned(const char *option, const char *text, unsigned low, unsigned high,
			 unsigned *value)
{
	unsigned long number;
	char *end;

	errno = 0;
	number = strtoul(text, &end, 10);
	if (errno || *end || end == text || *text == '-' || number < low || number > high)
		return msg_fail(-EINVAL, "%s '%s' is not a number from %u to %u", option, text, low,
				high);
	*value = (unsigned)number;
	return 0;
}

/* For options whose default is -1. */
static int take_index(const char *option, const char *text, int *value)
{
	return take_unsigned(option, text, 0, MAX_NUMBER, (unsigned *)value);
}

static int take_front_end(const char *text, struct server_options *options)
{
	options->frontend = frontend_find(text);
	if (!options->frontend && strcmp(text, "auto") != 0)
		return msg_fail(-EINVAL, "--front-end '%s' is neither auto, ublk nor fuse", text);
	return 0;
}

static int take_queues(const char *text, struct server_options *options)
{
	return take_unsigned("--queues", text, 1, MAX_QUEUES, &options->queues);
}

static int take_depth(const char *text, struct server_options *options)
{
	return take_unsigned("--depth", text, 1, MAX_DEPTH, &options->depth);
}

static int take_max_io(const char *text, struct server_options *options)
{
	uint64_t bytes;

	if (size_parse(text, &bytes) || bytes < MIN_IO_BYTES || bytes > MAX_IO_BYTES ||
	    bytes % BLOCK_BYTES)
		return msg_fail(-EINVAL, "--max-io '%s' is not a multiple of 4K from 64K to 32M",
				text);
	options->max_io_bytes = (uint32_t)bytes;
	return 0;
}

static int take_tag(const char *text, struct server_options *options)
{
	char *end;

	errno = 0;
	options->tag = strtoull(text, &end, 16);
	if (errno || *end || end == text || strlen(text) > 16)
		return msg_fail(-EINVAL,
				"--tag '%s' is not a number of up to 16 hexadecimal digits", text);
	options->tag_given = true;
	return 0;
}

static int take_recovery(const char *text, struct server_options *options)
{
	if (recovery_find(text, &options->recovery))
		return 0;
	return msg_fail(-EINVAL,
			"--recovery '%s' is neither none, reissue, queue, fail-io nor auto", text);
}

static int take_recover_fds(const char *text, struct server_options *options)
{
	static const unsigned most = sizeof(options->recover_fds) / sizeof(*options->recover_fds);
	_cleanup_free_ char *list = strdup(text);
	char *rest = list, *word;

	if (!list)
		return -ENOMEM;
	while ((word = strsep(&rest, ","))) {
		int *fd = &options->recover_fds[options->recover_fd_count];
		int err = -EINVAL;

		if (options->recover_fd_count++ < most)
			err = take_index("--recover-fds", word, fd);
		else
			msg_error("--recover-fds has more than %u descriptors", most);
		if (err)
			return err;
	}
	if (options->recover_fd_count >= 4)
		return 0;
	return msg_fail(
		-EINVAL,
		"--recover-fds '%s' does not have the descriptors of file, connection, queues and journal",
		text);
}

static int take_via(const char *text, struct server_options *options)
{
	json_t *rules = json_text_parse(text, strlen(text), 0, NULL);
	struct error error = {};
	int err = rules ? via_rules_set(VIA_OF_HOST, rules, &error) :
			  error_set(&error, -EINVAL, "it is no JSON");

	json_decref(rules);
	if (err)
		msg_error("--via: %s", error.text);
	if (err && *error.hint)
		msg_hint("%s", error.hint);
	return err;
}

static int take_feature(const char *text, struct server_options *options)
{
	const struct ublk_feature *feature = ublk_feature_find(text);

	if (!feature)
		return -EINVAL;
	options->features |= feature->flag;
	return 0;
}

static int take_help(const char *text, struct server_options *options);

static int take_version(const char *text, struct server_options *options)
{
	exit(print_version());
}

static const struct row table[] = {
	{ "front-end", "NAME", take_front_end, 0,
	  "ublk: as a block device; fuse: as a file, for a loop device\n"
	  "on it; auto (default): ublk if /dev/ublk-control exists" },
	{ "queues", "N", take_queues, 0,
	  "hardware queues, or threads on the file (default: one per\n"
	  "CPU that this process may use, at most 4)" },
	{ "depth", "N", take_depth, 0,
	  "requests in flight per queue, 1 to 1024 (default: ublk 64,\n"
	  "fuse 16, with lazy segments 64, 96 in all queues)" },
	{ "max-io", "SIZE", take_max_io, 0,
	  "largest request, 64K to 32M (default: ublk 256K, fuse 1M,\n"
	  "which is also its limit, with lazy segments 256K); the\n"
	  "server locks queues x depth x this much memory" },
	{ "id", "N", OPTION(id), "ublk: device number (default: the first free one)" },
	{ "tag", "HEX", take_tag, 0, "64-bit mark in the device's kernel record, or file name" },
	{ "control-fd", "FD", OPTION(control_fd),
	  "connected Unix socket that speaks JSON lines; INT and HUP\n"
	  "are then left to the owner" },
	{ "listen-fd", "FD", OPTION(listen_fd),
	  "listening Unix socket: root and this user may ask there too" },
	{ "via", "JSON", take_via, 0,
	  "caches in front of hosts, for lazy segments: a list of\n"
	  "{\"for\": PATTERN, \"caches\": [URL, ...], \"plain\": false}" },
	{ "recovery", "MODE", take_recovery, 0,
	  "what becomes of the device when this process dies. none: it\n"
	  "goes (default); reissue: requests in flight are given to\n"
	  "the next server, new ones wait for it; ublk queue: the\n"
	  "former fail; ublk fail-io: both fail until it is there;\n"
	  "auto: the best there is" },
	{ "recover", "ID", OPTION(recover_id),
	  "take over ublk device ID, whose server is gone; it must\n"
	  "carry --tag, and keeps its queues, depth and largest request" },
	{ "recover-fds", "FD,...", take_recover_fds, 0,
	  "take over the FUSE connection of a server that is gone: its\n"
	  "file, connection, queues and journal, in that order, as\n"
	  "kept open. --tag and DESCRIPTION must be the same; queues,\n"
	  "depth and largest request are" },
	{ "grow", NULL, OPTION(grow),
	  "what is taken over may be smaller than DESCRIPTION, whose\n"
	  "beginning it then is: it gets that size (ublk: Linux 6.16)" },
	{ "check", NULL, OPTION(check), "only say what is wrong with DESCRIPTION and its files" },
	{ "feature", "NAME", take_feature, 0,
	  "ublk: insist on a feature of the driver that is used where\n"
	  "there is one, or on auto-buf-reg, which is used only so: no\n"
	  "copies between disks and readers; may be repeated" },
	{ "features", NULL, OPTION(list_features),
	  "what the kernel offers, what is used of it, and why, as one\n"
	  "JSON line" },
	{ "list-devices", NULL, OPTION(list_devices),
	  "one JSON line per ublk device of this machine" },
	{ "delete-device", "ID", OPTION(delete_device),
	  "remove a device whose server is gone; it must carry --tag" },
	{ "help", NULL, take_help, 0, "this text" },
	{ "version", NULL, take_version, 0, "name and version" },
};

enum {
	ROW_COUNT = sizeof(table) / sizeof(*table),
	HELP_COLUMN = 22,
};

static const char help_head[] =
	"Usage: btrfs-ublk-server [OPTIONS] DESCRIPTION\n"
	"       btrfs-ublk-server [OPTIONS] --recover ID --tag HEX DESCRIPTION\n"
	"       btrfs-ublk-server --features\n"
	"       btrfs-ublk-server --list-devices\n"
	"       btrfs-ublk-server --delete-device ID --tag HEX\n"
	"\n"
	"Serve the address space that DESCRIPTION (a JSON file, or - for standard input)\n"
	"defines, until TERM or INT, or until the owner at the other end of the control\n"
	"socket has gone. While the device is mounted, or the file open, it is served on;\n"
	"a second signal ends the server all the same, and with it the device, unless that\n"
	"has a recovery: then it waits for --recover.\n"
	"\n";

static const char help_tail[] =
	"\n"
	"When reads are answered, a JSON line with \"event\": \"ready\", and \"device\" or\n"
	"\"file\", goes to the control socket, or to standard output where there is none.\n"
	"Exit status: 0 stopped as asked, 1 failure, 2 wrong usage or description, 3 the\n"
	"machine lacks something, 4 handed over: the device waits for --recover.\n";

static void print_row(const struct row *row)
{
	const char *line = row->help, *end;
	int column = printf("  --%s", row->name);

	if (row->argument)
		column += printf(" %s", row->argument);
	for (; (end = strchr(line, '\n')); line = end + 1) {
		printf("%*s%.*s\n", HELP_COLUMN - column, "", (int)(end - line), line);
		column = 0;
	}
	printf("%*s%s\n", HELP_COLUMN - column, "", line);
}

static int take_help(const char *text, struct server_options *options)
{
	fputs(help_head, stdout);
	for (unsigned i = 0; i < ROW_COUNT; i++)
		print_row(&table[i]);
	fputs(help_tail, stdout);
	exit(EXIT_OK);
}

static unsigned default_queues(void)
{
	unsigned count = (unsigned)get_nprocs();
	cpu_set_t cpus;

	if (!sched_getaffinity(0, sizeof(cpus), &cpus))
		count = (unsigned)CPU_COUNT(&cpus);
	return count > DEFAULT_QUEUES ? DEFAULT_QUEUES : count;
}

static int take_row(const struct row *row, struct server_options *options)
{
	void *value = (char *)options + row->at;
	char name[40];

	if (row->take)
		return row->take(optarg, options);
	if (!row->argument) {
		*(bool *)value = true;
		return 0;
	}
	snprintf(name, sizeof(name), "--%s", row->name);
	return take_index(name, optarg, value);
}

static int take_all(int argc, char **argv, struct server_options *options)
{
	struct option long_options[ROW_COUNT + 1] = {};
	int index;

	for (unsigned i = 0; i < ROW_COUNT; i++) {
		long_options[i].name = table[i].name;
		long_options[i].has_arg = table[i].argument ? required_argument : no_argument;
		long_options[i].val = (int)i;
	}
	while ((index = getopt_long(argc, argv, "", long_options, NULL)) != -1) {
		int err = -EINVAL;

		/* '?': getopt has printed the error. NB: this limits the table to 62 rows. */
		_Static_assert(ROW_COUNT < '?', "getopt's error is no row");
		if (index != '?')
			err = take_row(&table[index], options);
		if (err)
			return err;
	}
	return 0;
}

int server_options_parse(int argc, char **argv, struct server_options *options)
{
	int err;

	*options = (struct server_options){
		.id = -1,
		.recover_id = -1,
		.control_fd = -1,
		.listen_fd = -1,
		.delete_device = -1,
	};
	err = take_all(argc, argv, options);
	if (!err)
		err = server_options_check(options, argc - optind);
	if (err)
		return err;
	options->description = argv[optind];
	if (options->recover_fd_count)
		options->queues = options->recover_fd_count - 3;
	else if (!options->queues)
		options->queues = default_queues();
	return 0;
}
