/* SPDX-License-Identifier: MIT */
/*
 * btrfs-ublk-seed: prints the layout of a btrfs, or makes a seed of one whose file of virtual data
 * is preallocated.
 *
 * The kernel reads a preallocated extent as zeroes, without asking the device. Only the type byte
 * in its file extent item tells it from a regular one, so `flip` changes that byte. Tree blocks are
 * changed in place, and only their checksums change with it: pointers to a block hold its
 * generation, not its checksum. So no other tree may refer to these blocks, as a snapshot would.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/cleanup.h"
#include "base/message.h"
#include "base/size.h"
#include "btrfs/cursor.h"
#include "btrfs/super.h"
#include "tools/seed-print.h"

#define PROGRAM "btrfs-ublk-seed"

static const char help_text[] =
	"Usage: " PROGRAM " inspect IMAGE\n"
	"       " PROGRAM " flip INODE IMAGE\n"
	"inspect prints the layout of a btrfs as a line of JSON, as `btrfs-ublk seed` explains\n"
	"it. flip makes a seed of a new btrfs that is not mounted: it turns the preallocated\n"
	"extents of a file of the top-level subvolume into regular ones, and sets the SEEDING\n"
	"flag. A failed flip leaves an image that cannot be used.\n"
	"Exit status: 0, 1 on failure, 2 after wrong usage.\n";

static int flip_extents(struct reader *reader, int fd, uint64_t inode)
{
	_cleanup_(cursor_close) struct cursor cursor = { 0 };
	struct key first = { inode, KEY_EXTENT_DATA, 0 };
	struct block_expect root;
	int ret = tree_root_find(reader, TREE_FS, &root);

	if (ret)
		return ret;
	cursor_init(&cursor, reader, &root);
	for (ret = cursor_seek(&cursor, &first); ret > 0; ret = cursor_next(&cursor)) {
		struct cursor_level *leaf = &cursor.levels[0];
		struct disk_file_extent *extent =
			(void *)(leaf->block + (cursor.data - leaf->block));

		if (cursor.key.objectid != inode || cursor.key.type != KEY_EXTENT_DATA)
			return 0;
		if (cursor.size != sizeof(*extent) || extent->type != FILE_EXTENT_PREALLOC)
			return cursor_fail(&cursor, "it is no preallocated extent");
		extent->type = FILE_EXTENT_REGULAR;
		ret = reader_write_block(reader, fd, leaf->expect.bytenr, leaf->block);
		if (ret)
			return ret;
	}
	return ret;
}

static int flip(struct reader *reader, int fd, uint64_t inode)
{
	struct disk_super super = reader->super;
	int ret;

	if (super.log_root)
		return reader_fail(reader, -EINVAL, "superblock: it was not unmounted");
	ret = flip_extents(reader, fd, inode);
	super.flags |= htole64(SUPER_SEEDING);
	if (ret)
		return ret;
	ret = super_write(fd, &super, reader->csum);
	if (!ret && fsync(fd))
		ret = -errno;
	return ret ? reader_fail(reader, ret, "cannot write to it: %s", strerror(-ret)) : 0;
}

static int inspect(struct reader *reader, const char *path)
{
	struct layout layout;
	int ret = layout_find(reader, &layout);

	if (!ret && print_layout(path, reader, &layout))
		ret = reader_fail(reader, -EIO, "cannot print the layout");
	return ret;
}

int main(int argc, char **argv)
{
	bool is_flip = argc > 1 && !strcmp(argv[1], "flip");
	_cleanup_close_ int fd = -1;
	struct reader reader;
	struct stat status;
	const char *path;
	uint64_t inode;
	int ret;

	message_init(PROGRAM);
	if (answer_options(argc, argv, help_text, &ret))
		return ret;
	if (argc < 2 || (!is_flip && strcmp(argv[1], "inspect") != 0))
		return usage_error("neither inspect nor flip", argc < 2 ? NULL : argv[1]);
	if (argc != (is_flip ? 4 : 3))
		return usage_error("wrong number of words", NULL);
	if (is_flip && size_parse(argv[2], &inode))
		return usage_error("INODE is not a number", argv[2]);
	path = argv[argc - 1];
	/* NB: opening a FIFO would block. */
	fd = open(path, (is_flip ? O_RDWR : O_RDONLY) | O_CLOEXEC | O_NONBLOCK);
	if (fd < 0 || fstat(fd, &status))
		return msg_fail(EXIT_FAILED, "%s: %s", path, strerror(errno));
	if (!S_ISREG(status.st_mode) && !S_ISBLK(status.st_mode))
		return msg_fail(EXIT_FAILED, "%s is neither a regular file nor a block device",
				path);
	ret = reader_open(&reader, fd);
	if (ret)
		return msg_fail(EXIT_FAILED, "%s: %s", path, reader.error);
	ret = is_flip ? flip(&reader, fd, inode) : inspect(&reader, path);
	reader_close(&reader);
	return ret ? msg_fail(EXIT_FAILED, "%s: %s", path, reader.error) : EXIT_OK;
}
