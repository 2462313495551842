/* SPDX-License-Identifier: MIT */
/*
 * btrfs-ublk-readimage: writes a tree of a sealed image as a tar, or as one of two lists; or makes
 * it again, by clones, in another btrfs.
 */
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
#include "image/tar_write.h"
#include "image/tree.h"
#include "image/tree_extents.h"
#include "image/tree_list.h"
#include "image/tree_make.h"

#define PROGRAM "btrfs-ublk-readimage"

enum { OUTPUT_BYTES = 1024 * 1024, DECIMAL = 10 };

static const char help_text[] =
	"Usage: " PROGRAM " tar|list|extents SUBVOLUME IMAGE\n"
	"       " PROGRAM " make SUBVOLUME IMAGE DATA-BYTES [TARGET-FD DATA-FD DATA-OFFSET]\n"
	"Read a subvolume, by its number, of a btrfs of one device in a file, without\n"
	"mounting it. Nothing is trusted.\n"
	"\n"
	"  tar          write all of it to stdout as a tar; the same tree makes the same\n"
	"               bytes. Sockets, which no tar can hold, are left out and counted\n"
	"               on stderr\n"
	"  list         write a line for each entry to stdout, with digests of attributes\n"
	"               and content; equal trees make equal lines (csrc/image/tree_list.h)\n"
	"  extents      write a line for each extent of a file to stdout, with its place\n"
	"               (csrc/image/tree_extents.h); IMAGE needs no data for that\n"
	"  make         make it in the directory that is open as TARGET-FD, which is empty,\n"
	"               and closed to all others. Files are clones of ranges of the file that\n"
	"               is open as DATA-FD, and has the data object, of DATA-BYTES, at\n"
	"               DATA-OFFSET. Without the three, only check whether the tree can be\n"
	"               made. stdout gets a line now and then, and at the end: numbers of\n"
	"               entries, of bytes that were cloned, and of bytes that were written.\n"
	"               IMAGE has only metadata\n"
	"\n"
	"  --help, --version\n"
	"\n"
	"Exit status: 0 done, 1 IMAGE is damaged, or the result cannot be written, 2 wrong\n"
	"usage.\n";

struct options {
	uint64_t subvolume;
	const char *path;
	int (*write)(struct reader *reader, const struct options *options, struct error *error);
	struct tree_make_options make;
};

static int write_tar(struct reader *reader, const struct options *options, struct error *error)
{
	struct tar_writer writer;
	int ret;

	tar_writer_init(&writer, stdout, error);
	ret = tree_read(reader, options->subvolume, &writer.visitor, error);
	if (!ret)
		ret = tar_writer_finish(&writer);
	if (!ret && writer.sockets)
		msg_warning("%" PRIu64 " sockets are left out: no tar can hold one",
			    writer.sockets);
	tar_writer_deinit(&writer);
	return ret;
}

static int write_list(struct reader *reader, const struct options *options, struct error *error)
{
	struct tree_lister lister;
	int ret = tree_lister_init(&lister, stdout, error);

	if (!ret)
		ret = tree_read(reader, options->subvolume, &lister.visitor, error);
	if (!ret)
		ret = tree_lister_finish(&lister);
	tree_lister_deinit(&lister);
	return ret;
}

static int write_extents(struct reader *reader, const struct options *options, struct error *error)
{
	struct extent_lister lister;
	int ret;

	extent_lister_init(&lister, stdout, error);
	ret = tree_read(reader, options->subvolume, &lister.visitor, error);
	return ret ?: extent_lister_finish(&lister);
}

static void say_entries(uint64_t entries)
{
	printf("%" PRIu64 "\n", entries);
	fflush(stdout);
}

static int make_tree(struct reader *reader, const struct options *options, struct error *error)
{
	struct tree_maker maker;
	int ret;

	umask(0); /* modes are those of the image */
	tree_maker_init(&maker, &options->make, error);
	ret = tree_read(reader, options->subvolume, &maker.visitor, error);
	if (!ret)
		ret = tree_maker_finish(&maker);
	if (!ret)
		printf("%" PRIu64 " %" PRIu64 " %" PRIu64 "\n", maker.entries, maker.cloned_bytes,
		       maker.written_bytes);
	tree_maker_deinit(&maker);
	return ret;
}

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

/* Takes DATA-BYTES, and the three after it, if they are there. */
static bool take_make_options(int count, char **words, struct tree_make_options *make)
{
	uint64_t target, data;

	if (count != 1 && count != 4) {
		usage_error("make needs DATA-BYTES, and three more words or none", NULL);
		return false;
	}
	if (!take_number(words[0], INT64_MAX, &make->data_bytes))
		return false;
	if (count == 1)
		return true;
	if (!take_number(words[1], INT32_MAX, &target) ||
	    !take_number(words[2], INT32_MAX, &data) ||
	    !take_number(words[3], INT64_MAX - make->data_bytes, &make->data_offset))
		return false;
	make->target = (int)target;
	make->data = (int)data;
	return true;
}

/* Returns an exit status. There is work to do when it has set the path. */
static int options_parse(struct options *options, int argc, char **argv)
{
	static const struct {
		const char *name;
		int (*write)(struct reader *reader, const struct options *options,
			     struct error *error);
	} verbs[] = {
		{ "tar", write_tar },
		{ "list", write_list },
		{ "extents", write_extents },
		{ "make", make_tree },
	};

	for (size_t i = 0; argc > 1 && i < sizeof(verbs) / sizeof(*verbs); i++)
		if (!strcmp(argv[1], verbs[i].name))
			options->write = verbs[i].write;
	if (!options->write)
		return usage_error("tar, list, extents or make is needed", NULL);
	if (argc < 4 || (argc > 4 && options->write != make_tree))
		return usage_error("SUBVOLUME and IMAGE are needed", NULL);
	if (!take_number(argv[2], UINT64_MAX, &options->subvolume))
		return EXIT_USAGE;
	if (!tree_holds_files(options->subvolume))
		return usage_error("no number of a subvolume", argv[2]);
	if (options->write == make_tree && !take_make_options(argc - 4, argv + 4, &options->make))
		return EXIT_USAGE;
	options->path = argv[3];
	return EXIT_OK;
}

int main(int argc, char **argv)
{
	_cleanup_close_ int fd = -1;
	struct options options = {
		.make = { .target = -1, .data = -1, .progress = say_entries },
	};
	struct error error = { 0 };
	struct reader reader;
	int status, ret;

	message_init(PROGRAM);
	if (answer_options(argc, argv, help_text, &status))
		return status;
	status = options_parse(&options, argc, argv);
	if (!options.path)
		return status;
	fd = open(options.path, O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		return msg_fail(EXIT_FAILED, "%s: %s", options.path, strerror(errno));
	if (reader_open(&reader, fd))
		return msg_fail(EXIT_FAILED, "%s", reader.error);
	setvbuf(stdout, NULL, _IOFBF, OUTPUT_BYTES);
	ret = options.write(&reader, &options, &error);
	if (ret)
		msg_error_of(&error);
	reader_close(&reader);
	return ret ? EXIT_FAILED : EXIT_OK;
}
