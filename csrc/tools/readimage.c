/* SPDX-License-Identifier: MIT */
/* btrfs-ublk-readimage: writes a tree of a sealed image as a tar, or as one of two lists. */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/cleanup.h"
#include "base/message.h"
#include "image/tar_write.h"
#include "image/tree.h"
#include "image/tree_extents.h"
#include "image/tree_list.h"

#define PROGRAM "btrfs-ublk-readimage"

enum { OUTPUT_BYTES = 1024 * 1024, DECIMAL = 10 };

static const char help_text[] =
	"Usage: " PROGRAM " tar|list|extents SUBVOLUME IMAGE\n"
	"Read a subvolume, by its number, of a btrfs of one device in a file, without\n"
	"mounting it. Nothing is trusted, and nothing but stdout is written.\n"
	"\n"
	"  tar          write all of it to stdout as a tar; the same tree makes the same\n"
	"               bytes. Sockets, which no tar can hold, are left out and counted\n"
	"               on stderr\n"
	"  list         write a line for each entry to stdout, with digests of attributes\n"
	"               and content; equal trees make equal lines (csrc/image/tree_list.h)\n"
	"  extents      write a line for each extent of a file to stdout, with its place\n"
	"               (csrc/image/tree_extents.h); IMAGE needs no data for that\n"
	"\n"
	"  --help, --version\n"
	"\n"
	"Exit status: 0 done, 1 IMAGE is damaged or stdout cannot be written, 2 wrong\n"
	"usage.\n";

static int write_tar(struct reader *reader, uint64_t subvolume, struct error *error)
{
	struct tar_writer writer;
	int ret;

	tar_writer_init(&writer, stdout, error);
	ret = tree_read(reader, subvolume, &writer.visitor, error);
	if (!ret)
		ret = tar_writer_finish(&writer);
	if (!ret && writer.sockets)
		msg_warning("%" PRIu64 " sockets are left out: no tar can hold one",
			    writer.sockets);
	tar_writer_deinit(&writer);
	return ret;
}

static int write_list(struct reader *reader, uint64_t subvolume, struct error *error)
{
	struct tree_lister lister;
	int ret = tree_lister_init(&lister, stdout, error);

	if (!ret)
		ret = tree_read(reader, subvolume, &lister.visitor, error);
	if (!ret)
		ret = tree_lister_finish(&lister);
	tree_lister_deinit(&lister);
	return ret;
}

static int write_extents(struct reader *reader, uint64_t subvolume, struct error *error)
{
	struct extent_lister lister;
	int ret;

	extent_lister_init(&lister, stdout, error);
	ret = tree_read(reader, subvolume, &lister.visitor, error);
	return ret ?: extent_lister_finish(&lister);
}

static const struct form {
	const char *name;
	int (*write)(struct reader *reader, uint64_t subvolume, struct error *error);
} forms[] = {
	{ "tar", write_tar },
	{ "list", write_list },
	{ "extents", write_extents },
};

struct options {
	uint64_t subvolume;
	const char *path;
	const struct form *form;
};

/* Returns an exit status. There is work to do when it has set the path. */
static int options_parse(struct options *options, int argc, char **argv)
{
	char *end;

	if (argc != 4)
		return usage_error("tar, list or extents, SUBVOLUME and IMAGE are needed", NULL);
	for (size_t i = 0; i < sizeof(forms) / sizeof(*forms); i++)
		if (!strcmp(argv[1], forms[i].name))
			options->form = &forms[i];
	if (!options->form)
		return usage_error("no such thing to do", argv[1]);
	errno = 0;
	options->subvolume = strtoull(argv[2], &end, DECIMAL);
	if (errno || *end || !tree_holds_files(options->subvolume))
		return usage_error("no number of a subvolume", argv[2]);
	options->path = argv[3];
	return EXIT_OK;
}

int main(int argc, char **argv)
{
	_cleanup_close_ int fd = -1;
	struct options options = { 0 };
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
	ret = options.form->write(&reader, options.subvolume, &error);
	if (ret)
		msg_error("%s", error.text);
	reader_close(&reader);
	return ret ? EXIT_FAILED : EXIT_OK;
}
