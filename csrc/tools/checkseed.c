/* SPDX-License-Identifier: MIT */
/* btrfs-ublk-checkseed: prints the layout of a btrfs image, and checks whether it is sound. */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "base/cleanup.h"
#include "base/message.h"
#include "tools/checkseed-print.h"
#include "tools/open_image.h"

#define PROGRAM "btrfs-ublk-checkseed"

static const char help_text[] =
	"Usage: " PROGRAM " inspect|check IMAGE\n"
	"Print the layout of a btrfs that is not mounted, or what a seed violates, as a line\n"
	"of JSON, as `btrfs-ublk seed` explains it.\n"
	"Exit status: 0 all is well, 1 a violation was found or IMAGE cannot be read, 2\n"
	"wrong usage.\n";

struct options {
	const char *path;
	bool check;
};

/* Returns an exit status. There is work to do when it has set the path. */
static int options_parse(struct options *options, int argc, char **argv)
{
	if (argc < 2)
		return usage_error("inspect or check is missing", NULL);
	options->check = !strcmp(argv[1], "check");
	if (!options->check && strcmp(argv[1], "inspect") != 0)
		return usage_error("neither inspect nor check", argv[1]);
	if (argc < 3 || !*argv[2])
		return usage_error("IMAGE is missing", NULL);
	if (argc > 3)
		return usage_error("one IMAGE only; unexpected", argv[3]);
	options->path = argv[2];
	return EXIT_OK;
}

static int print_failed(int error_number)
{
	return msg_fail(EXIT_FAILED, "cannot print the result: %s", strerror(-error_number));
}

static int inspect(const struct options *options, struct reader *reader)
{
	struct layout layout;
	int ret = layout_find(reader, &layout);

	if (ret) {
		msg_error("%s: %s", options->path, reader->error);
		msg_hint("`" PROGRAM " check` lists all that is wrong");
		return EXIT_FAILED;
	}
	ret = print_layout(options->path, reader, &layout);
	return ret ? print_failed(ret) : EXIT_OK;
}

/* An image that cannot be read violates a rule like others. */
static int check(const struct options *options, struct reader *reader, int open_error)
{
	_cleanup_(report_deinit) struct report report = { 0 };
	struct layout layout = { 0 };
	int ret = 0;

	if (open_error)
		report_add(&report, RULE_SUPERBLOCK, "%s", reader->error);
	else
		ret = check_image(reader, &layout, &report);
	if (ret)
		return msg_fail(EXIT_FAILED, "%s: %s", options->path,
				ret == -ENOMEM ? strerror(ENOMEM) : reader->error);
	ret = print_report(options->path, &layout, &report);
	if (ret)
		return print_failed(ret);
	return report.total ? EXIT_FAILED : EXIT_OK;
}

int main(int argc, char **argv)
{
	_cleanup_close_ int fd = -1;
	struct options options = { 0 };
	struct reader reader;
	int status, ret;

	message_init(PROGRAM);
	if (answer_options(argc, argv, help_text, &status))
		return status;
	status = options_parse(&options, argc, argv);
	if (!options.path)
		return status;
	fd = open_unmounted(options.path);
	if (fd < 0)
		return EXIT_FAILED;
	ret = reader_open(&reader, fd);
	if (ret && (!options.check || ret == -ENOMEM))
		return msg_fail(EXIT_FAILED, "%s: %s", options.path, reader.error);
	status = options.check ? check(&options, &reader, ret) : inspect(&options, &reader);
	if (!ret)
		reader_close(&reader);
	return status;
}
