/* SPDX-License-Identifier: MIT */
/*
 * btrfs-ublk-map-physical: prints where the bytes of a btrfs file are, from the file extent items
 * of its subvolume tree joined with the chunk tree (linux/btrfs_tree.h: struct
 * btrfs_file_extent_item, struct btrfs_chunk).
 */
#include "base/cleanup.h"
#include "base/message.h"
#include "base/size.h"
#include "physmap/chunks.h"
#include "physmap/rows.h"
#include "physmap/search.h"

#include <assert.h>
#include <endian.h>
#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <limits.h>
#include <linux/btrfs.h>
#include <linux/btrfs_tree.h>
#include <linux/fiemap.h>
#include <linux/fs.h>
#include <linux/magic.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/vfs.h>

static const char usage_text[] =
	"Usage: btrfs-ublk-map-physical [--json | --format FORMAT] [--output-fd FD] PATH\n"
	"List where the bytes of the btrfs file PATH are; `btrfs-ublk map-physical --help`\n"
	"explains the columns. FORMAT is tsv (default), json, or binary: \"buphys1\\n\", then\n"
	"nine little-endian 64-bit numbers per row, all ones for none. JSON has three more\n"
	"keys: piece_offset (of this piece in the logical extent), copy (0 is the first) and\n"
	"profile (single, dup, raid0, ...).\n"
	"Exit status: 0, 1 on failure, 2 if the arguments or PATH are not usable.\n";

struct mapper {
	/* Inputs. */
	const char *path;
	const struct map_format *format;
	int output_fd;
	/* State. */
	int fd;
	struct chunk_map chunks;
	struct map_row row;
	struct map_output *output;
	uint64_t file_position; /* where the printed extents end */
	uint64_t block_bytes;
};

static void mapper_deinit(struct mapper *mapper)
{
	chunk_map_deinit(&mapper->chunks);
	cleanup_close(&mapper->fd);
	free(mapper->output);
}

static void tell_no_trees(const char *path, int error)
{
	msg_error("cannot read the btrfs trees of %s: %s", path, strerror(-error));
	if (error == -EPERM)
		msg_hint("reading trees needs CAP_SYS_ADMIN in the initial user namespace; "
			 "run as root");
}

static int emit_row(struct mapper *mapper)
{
	mapper->format->row(mapper->output, &mapper->row);
	return mapper->output->error;
}

static int emit_piece(void *context, const struct chunk_piece *piece)
{
	struct mapper *mapper = context;
	struct map_row *row = &mapper->row;

	row->physical_size = piece->length;
	row->devid = piece->devid;
	row->physical_offset = piece->physical;
	row->piece_offset = piece->logical - row->logical_offset;
	row->copy = piece->copy;
	row->profile = piece->profile;
	return emit_row(mapper);
}

/* Reads the chunk tree again, because a balance may have made a chunk since. */
static int reload_chunks(struct mapper *mapper)
{
	int ret;

	chunk_map_deinit(&mapper->chunks);
	ret = chunk_map_init(&mapper->chunks, mapper->fd);
	if (ret < 0)
		tell_no_trees(mapper->path, ret);
	return ret;
}

static int emit_mapped(struct mapper *mapper)
{
	const struct map_row *row = &mapper->row;
	const uint64_t end = row->logical_offset + row->logical_size;
	uint64_t position = row->logical_offset;
	bool reloaded = false;
	int ret;

	for (;;) {
		ret = chunk_map_pieces(&mapper->chunks, &position, end, emit_piece, mapper);
		if (ret != -ENOENT || reloaded)
			break;
		reloaded = true;
		ret = reload_chunks(mapper);
		if (ret < 0)
			return ret;
	}
	if (ret == -ENOENT)
		msg_error("%s: the extent at file offset %llu is at logical address %llu, "
			  "which is in no chunk",
			  mapper->path, (unsigned long long)row->file_offset,
			  (unsigned long long)position);
	if (ret == -EOPNOTSUPP)
		return msg_fail(
			ret,
			"%s: the chunk at logical address %llu has a layout that this program "
			"does not know (raid stripe tree, or a newer feature)",
			mapper->path, (unsigned long long)position);
	return ret;
}

static int emit_hole(struct mapper *mapper, uint64_t end)
{
	if (end <= mapper->file_position)
		return 0;
	mapper->row = (struct map_row){
		.file_offset = mapper->file_position,
		.file_size = end - mapper->file_position,
		.kind = MAP_HOLE,
	};
	return emit_row(mapper);
}

/* linux/btrfs_tree.h: an inline extent's bytes take the place of disk_bytenr and what follows. */
static_assert(offsetof(struct btrfs_file_extent_item, disk_bytenr) == 21, "file extent head");
static_assert(sizeof(struct btrfs_file_extent_item) == 53, "struct btrfs_file_extent_item");

static int emit_extent(struct mapper *mapper, const struct tree_item *item)
{
	const size_t head_bytes = offsetof(struct btrfs_file_extent_item, disk_bytenr);
	struct btrfs_file_extent_item raw = { 0 };
	struct map_row *row = &mapper->row;
	int ret;

	memcpy(&raw, item->data, item->length < sizeof(raw) ? item->length : sizeof(raw));
	if (item->length < head_bytes ||
	    (raw.type != BTRFS_FILE_EXTENT_INLINE && item->length < sizeof(raw)))
		return msg_fail(-EUCLEAN,
				"%s: the extent item at file offset %llu has only %u bytes",
				mapper->path, (unsigned long long)item->offset, item->length);
	/* With NO_HOLES (the default since btrfs-progs 5.15), holes have no items. */
	ret = emit_hole(mapper, item->offset);
	if (ret < 0)
		return ret;

	*row = (struct map_row){
		.file_offset = item->offset,
		.file_size = le64toh(raw.num_bytes),
		.extent_offset = le64toh(raw.offset),
		.kind = raw.type,
		.compression = raw.compression,
		.encryption = raw.encryption,
		.other_encoding = le16toh(raw.other_encoding),
		.is_mapped = true,
		.logical_size = le64toh(raw.disk_num_bytes),
		.logical_offset = le64toh(raw.disk_bytenr),
	};
	if (raw.type == BTRFS_FILE_EXTENT_INLINE) {
		row->file_size = le64toh(raw.ram_bytes);
		row->extent_offset = 0;
		row->is_mapped = false;
	} else if (!raw.disk_bytenr) {
		row->kind = MAP_HOLE;
		row->is_mapped = false;
	}
	/* An inline extent has its block to itself. */
	mapper->file_position =
		round_up_u64(row->file_offset + row->file_size, mapper->block_bytes);
	return row->is_mapped ? emit_mapped(mapper) : emit_row(mapper);
}

static int emit_extents(struct mapper *mapper, const struct stat *file)
{
	_cleanup_(tree_search_deinit) struct tree_search search = { 0 };
	struct tree_item item;
	int ret;

	/* Tree 0 is the subvolume that the descriptor refers to; st_ino is the object id there. */
	ret = tree_search_init(&search, mapper->fd, 0, file->st_ino, BTRFS_EXTENT_DATA_KEY);
	if (ret < 0) {
		tell_no_trees(mapper->path, ret);
		return ret;
	}
	while ((ret = tree_search_next(&search, &item)) > 0) {
		ret = emit_extent(mapper, &item);
		if (ret < 0)
			return ret;
	}
	if (ret < 0) {
		tell_no_trees(mapper->path, ret);
		return ret;
	}
	return emit_hole(mapper, round_up_u64((uint64_t)file->st_size, mapper->block_bytes));
}

/*
 * Makes the tree show what the file contains. NB: fsync() is not enough: since Linux 5.10 it may
 * return before the file extent items are in the subvolume's tree (commit 48778179ce1f logs
 * unfinished ordered extents). FIEMAP with FIEMAP_FLAG_SYNC waits for them, needs no write access
 * and forces no commit. For a range of one byte it lists next to nothing.
 */
static int write_dirty_data(const struct mapper *mapper)
{
	struct fiemap request = { .fm_length = 1, .fm_flags = FIEMAP_FLAG_SYNC };
	int ret;

	if (ioctl(mapper->fd, FS_IOC_FIEMAP, &request) == 0)
		return 0;
	ret = -errno;
	return msg_fail(ret, "cannot write the dirty data of %s: %s", mapper->path, strerror(-ret));
}

static int refuse(const char *path, const char *what)
{
	msg_error("%s %s", path, what);
	msg_hint("name a regular file on btrfs");
	return EXIT_USAGE;
}

/* Returns an exit status; with EXIT_OK, mapper->fd is open. */
static int open_file(struct mapper *mapper, struct stat *file)
{
	struct btrfs_ioctl_fs_info_args info = { 0 };
	struct statfs file_system;

	/* NB: opening a FIFO blocks and opening a device can do things, so look first. */
	if (stat(mapper->path, file) < 0) {
		int error = errno;

		msg_error("cannot open %s: %s", mapper->path, strerror(error));
		return error == ENOENT || error == ENOTDIR || error == ELOOP ||
				       error == ENAMETOOLONG ?
			       EXIT_USAGE :
			       EXIT_FAILED;
	}
	if (S_ISDIR(file->st_mode))
		return refuse(mapper->path, "is a directory");
	if (!S_ISREG(file->st_mode))
		return refuse(mapper->path, "is not a regular file");
	mapper->fd = open(mapper->path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
	if (mapper->fd < 0 || fstatfs(mapper->fd, &file_system) < 0)
		return msg_fail(EXIT_FAILED, "cannot open %s: %s", mapper->path, strerror(errno));
	if (file_system.f_type != BTRFS_SUPER_MAGIC)
		return refuse(mapper->path, "is not on a btrfs file system");
	if (ioctl(mapper->fd, BTRFS_IOC_FS_INFO, &info) < 0)
		return msg_fail(EXIT_FAILED, "cannot ask for the file system of %s: %s",
				mapper->path, strerror(errno));
	mapper->block_bytes = info.sectorsize ? info.sectorsize : BLOCK_BYTES;
	return EXIT_OK;
}

static int map_file(struct mapper *mapper)
{
	struct stat file;
	int status, ret;

	status = open_file(mapper, &file);
	if (status != EXIT_OK)
		return status;
	mapper->output = malloc(sizeof(*mapper->output));
	if (!mapper->output)
		return msg_fail(EXIT_FAILED, "out of memory");
	mapper->output->fd = mapper->output_fd;
	mapper->output->error = 0;
	mapper->output->used = 0;

	ret = write_dirty_data(mapper);
	if (ret < 0)
		return EXIT_FAILED;
	ret = chunk_map_init(&mapper->chunks, mapper->fd);
	if (ret < 0) {
		tell_no_trees(mapper->path, ret);
		return EXIT_FAILED;
	}
	/* Get the size only now, so that it belongs to the extents that are listed. */
	if (fstat(mapper->fd, &file) < 0)
		return msg_fail(EXIT_FAILED, "cannot stat %s: %s", mapper->path, strerror(errno));
	if (mapper->format->begin)
		mapper->format->begin(mapper->output);
	ret = emit_extents(mapper, &file);
	map_output_flush(mapper->output);
	if (mapper->output->error)
		return msg_fail(EXIT_FAILED, "cannot write the output: %s",
				strerror(-mapper->output->error));
	return ret < 0 ? EXIT_FAILED : EXIT_OK;
}

static int parse_fd(const char *text, int *fd)
{
	char *end;
	long number;

	errno = 0;
	number = strtol(text, &end, 10);
	if (errno || end == text || *end || number < 0 || number > INT_MAX)
		return -EINVAL;
	if (fcntl((int)number, F_GETFD) < 0)
		return -errno;
	*fd = (int)number;
	return 0;
}

int main(int argc, char **argv)
{
	static const struct option options[] = {
		{ "json", no_argument, NULL, 'j' },
		{ "format", required_argument, NULL, 'f' },
		{ "output-fd", required_argument, NULL, 'o' },
		{ "help", no_argument, NULL, 'h' },
		{ "version", no_argument, NULL, 'V' },
		{ 0 },
	};
	_cleanup_(mapper_deinit) struct mapper mapper = { .fd = -1, .output_fd = STDOUT_FILENO };
	const char *format = "tsv";
	int option;

	message_init("btrfs-ublk-map-physical");
	while ((option = getopt_long(argc, argv, "h", options, NULL)) != -1) {
		switch (option) {
		case 'j':
			format = "json";
			break;
		case 'f':
			format = optarg;
			break;
		case 'o':
			if (parse_fd(optarg, &mapper.output_fd) < 0)
				return msg_fail(EXIT_USAGE, "'%s' is not an open file descriptor",
						optarg);
			break;
		case 'h':
			return print_help(usage_text);
		case 'V':
			return print_version();
		default:
			return hint_usage();
		}
	}
	mapper.format = map_format_find(format);
	if (!mapper.format) {
		msg_error("there is no format '%s'", format);
		msg_hint("choose tsv, json or binary");
		return EXIT_USAGE;
	}
	if (argc - optind != 1)
		return usage_error("one PATH is needed, and nothing else", NULL);
	mapper.path = argv[optind];
	return map_file(&mapper);
}
