/* SPDX-License-Identifier: MIT */
/* btrfs-ublk-maketree: makes a tree of a sealed image again, by clones, in another btrfs. */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "base/cleanup.h"
#include "base/message.h"
#include "image/tree.h"
#include "image/tree_make.h"

#define PROGRAM "btrfs-ublk-maketree"

enum { DECIMAL = 10, CHECK_ARGUMENTS = 4, ALL_ARGUMENTS = 7 };

static const char help_text[] =
	"Usage: " PROGRAM " IMAGE SUBVOLUME DATA-BYTES [TARGET-FD DATA-FD DATA-OFFSET]\n"
	"Make the tree of a subvolume, by its number, of a sealed image again. IMAGE is the\n"
	"file with its metadata; its data object has DATA-BYTES.\n"
	"\n"
	"The tree is made in the directory that is open as TARGET-FD, which is empty, and\n"
	"closed to all others. Files are clones of ranges of the file that is open as DATA-FD,\n"
	"and has the data object at DATA-OFFSET. Without the three, it is only checked whether\n"
	"the tree can be made.\n"
	"\n"
	"stdout gets a line now and then, and at the end: numbers of entries, of bytes that\n"
	"were cloned, and of bytes that were written.\n"
	"\n"
	"  --help, --version\n"
	"\n"
	"Exit status: 0 done, 1 IMAGE is damaged or the tree cannot be made, 2 wrong usage.\n";

struct arguments {
	const char *image;
	uint64_t subvolume;
	struct tree_make_options make;
};

static bool take_number(const char *text, uint64_t max, uint64_t *number)
{
	char *end;

	errno = 0;
	*number = strtoull(text, &end, DECIMAL);
	if (!errno && !*end && *text && *number <= max)
		return true;
	usage_error("no number", text);
	return false;
}

/* Returns an exit status. There is work to do when it has set the image. */
static int arguments_parse(struct arguments *arguments, int argc, char **argv)
{
	uint64_t target, data;

	if (argc != CHECK_ARGUMENTS && argc != ALL_ARGUMENTS)
		return usage_error("three arguments are needed, or six", NULL);
	if (!take_number(argv[2], UINT64_MAX, &arguments->subvolume))
		return EXIT_USAGE;
	if (!tree_holds_files(arguments->subvolume))
		return usage_error("no number of a subvolume", argv[2]);
	if (!take_number(argv[3], INT64_MAX, &arguments->make.data_bytes))
		return EXIT_USAGE;
	if (argc == ALL_ARGUMENTS) {
		if (!take_number(argv[4], INT32_MAX, &target) ||
		    !take_number(argv[5], INT32_MAX, &data) ||
		    !take_number(argv[6], INT64_MAX - arguments->make.data_bytes,
				 &arguments->make.data_offset))
			return EXIT_USAGE;
		arguments->make.target = (int)target;
		arguments->make.data = (int)data;
	}
	arguments->image = argv[1];
	return EXIT_OK;
}

static void say_entries(uint64_t entries)
{
	printf("%" PRIu64 "\n", entries);
	fflush(stdout);
}

static int make(struct reader *reader, const struct arguments *arguments, struct error *error)
{
	struct tree_maker maker;
	int ret;

	tree_maker_init(&maker, &arguments->make, error);
	ret = tree_read(reader, arguments->subvolume, &maker.visitor, error);
	if (!ret)
		ret = tree_maker_finish(&maker);
	if (!ret)
		printf("%" PRIu64 " %" PRIu64 " %" PRIu64 "\n", maker.entries, maker.cloned_bytes,
		       maker.written_bytes);
	tree_maker_deinit(&maker);
	return ret;
}

int main(int argc, char **argv)
{
	_cleanup_close_ int fd = -1;
	struct arguments arguments = {
		.make = { .target = -1, .data = -1, .progress = say_entries },
	};
	struct error error = { 0 };
	struct reader reader;
	int status, ret;

	message_init(PROGRAM);
	if (answer_options(argc, argv, help_text, &status))
		return status;
	status = arguments_parse(&arguments, argc, argv);
	if (!arguments.image)
		return status;
	umask(0); /* modes are those of the image */
	fd = open(arguments.image, O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		return msg_fail(EXIT_FAILED, "%s: %s", arguments.image, strerror(errno));
	if (reader_open(&reader, fd))
		return msg_fail(EXIT_FAILED, "%s", reader.error);
	ret = make(&reader, &arguments, &error);
	reader_close(&reader);
	if (ret)
		msg_error_of(&error);
	return ret ? EXIT_FAILED : EXIT_OK;
}
