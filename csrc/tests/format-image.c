/* SPDX-License-Identifier: MIT */
/*
 * format-image FILES OUTPUT: makes an ordinary, writable file system with the format library, to
 * be checked by btrfs-progs and kernels: DUP metadata in two small chunks and a large one, many
 * files in a directory, extents that several files share, and one that a file refers to twice.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>

#include "base/cleanup.h"
#include "base/message.h"
#include "base/size.h"
#include "btrfs/image.h"
#include "btrfs/inode.h"

enum { GENERATION = 7, FIRST_FILE = OBJECT_FIRST_FREE + 1, SHARE = 100, EXTENT_BYTES = 65536 };

#define DEVICE_BYTES GIB(4)
#define DATA_START MIB(1024)

struct file {
	uint64_t inode_number;
	uint64_t index;
	uint64_t disk_bytenr;
	char name[32];
};

struct listing {
	struct file *files;
	size_t count;
};

static int listing_fill(struct listing *listing, size_t count)
{
	listing->count = count;
	listing->files = calloc(count, sizeof(*listing->files));
	if (!listing->files)
		return -ENOMEM;
	for (size_t i = 0; i < count; i++) {
		struct file *file = &listing->files[i];

		snprintf(file->name, sizeof(file->name), "file-%zu", i);
		file->inode_number = FIRST_FILE + i;
		file->index = DIR_INDEX_FIRST + i;
		file->disk_bytenr = DATA_START + i / SHARE * 2 * EXTENT_BYTES;
	}
	return 0;
}

static int add_extent(struct image *image, struct tree_builder *tree, const struct file *file,
		      uint64_t offset)
{
	struct extent reference = {
		.start = file->disk_bytenr,
		.length = EXTENT_BYTES,
		.root = TREE_FS,
		.objectid = file->inode_number,
		.offset = offset,
		.count = 1,
		.is_data = true,
	};
	struct file_extent extent = {
		.offset = offset,
		.bytes = EXTENT_BYTES,
		.disk_bytenr = file->disk_bytenr,
		.disk_bytes = EXTENT_BYTES,
	};
	int ret = image_add_data(image, &reference);

	if (!ret)
		ret = file_extent_add(tree, file->inode_number, &extent);
	return ret;
}

/* The first file refers to its extent twice. */
static int emit_file(struct image *image, struct tree_builder *tree, const struct file *file)
{
	struct disk_inode inode = inode_make(GENERATION, image->params.time, 0100644);
	struct inode_name name = { OBJECT_FIRST_FREE, file->index, file->name, strlen(file->name) };
	unsigned pieces = file->inode_number == FIRST_FILE ? 2 : 1;
	int ret;

	inode.size = inode.byte_count = htole64(pieces * EXTENT_BYTES);
	inode.flags = htole64(INODE_NODATASUM);
	ret = inode_add(tree, file->inode_number, &inode);
	if (!ret)
		ret = inode_names_add(tree, file->inode_number, &name, 1);
	for (unsigned i = 0; i < pieces && !ret; i++)
		ret = add_extent(image, tree, file, i * EXTENT_BYTES);
	return ret;
}

static int emit_files(struct image *image, struct tree_builder *tree, void *context)
{
	const struct listing *listing = context;
	const uint64_t top = OBJECT_FIRST_FREE;
	struct disk_inode directory = inode_make(GENERATION, image->params.time, 040755);
	_cleanup_free_ struct dir_entry *entries = calloc(listing->count, sizeof(*entries));
	uint64_t size = 0;
	int ret;

	if (!entries)
		return -ENOMEM;
	for (size_t i = 0; i < listing->count; i++) {
		const struct file *file = &listing->files[i];

		entries[i] = (struct dir_entry){
			.name = file->name,
			.length = strlen(file->name),
			.target = { file->inode_number, KEY_INODE_ITEM, 0 },
			.index = file->index,
			.type = ENTRY_FILE,
		};
		size += 2 * entries[i].length;
	}
	directory.size = htole64(size);
	ret = inode_add(tree, top, &directory);
	if (!ret)
		ret = inode_top_add(tree, top);
	if (!ret)
		ret = dir_entries_add(tree, top, entries, listing->count);
	for (size_t i = 0; i < listing->count && !ret; i++)
		ret = emit_file(image, tree, &listing->files[i]);
	return ret;
}

static int add_chunks(struct image *image)
{
	/* Logical addresses differ from device offsets, and a second copy may come first. */
	static const struct chunk chunks[] = {
		{ MIB(1), MIB(8), CHUNK_SYSTEM | CHUNK_DUP, 2, { MIB(20), MIB(2) } },
		{ MIB(16), KIB(256), CHUNK_METADATA | CHUNK_DUP, 2, { MIB(30), MIB(31) } },
		{ MIB(17), KIB(128), CHUNK_METADATA | CHUNK_DUP, 2, { MIB(33), MIB(32) } },
		{ MIB(128), MIB(256), CHUNK_METADATA | CHUNK_DUP, 2, { MIB(128), MIB(512) } },
		{ DATA_START, GIB(2), CHUNK_DATA, 1, { MIB(1536) } },
	};
	int ret = 0;

	for (size_t i = 0; i < sizeof(chunks) / sizeof(chunks[0]) && !ret; i++)
		ret = image_add_chunk(image, &chunks[i]);
	return ret;
}

static int write_image(struct listing *listing, int fd)
{
	struct image_params params = {
		.fd = fd,
		.node_bytes = DEFAULT_NODE_BYTES,
		.device_bytes = DEVICE_BYTES,
		.generation = GENERATION,
		.time = 1000000000,
		.label = "format-image",
		.fsid = "fsid of an image",
		.device_uuid = "uuid of a device",
		.chunk_tree_uuid = "uuid of a chunk ",
	};
	struct image_tree files = {
		.objectid = TREE_FS,
		.top_inode = OBJECT_FIRST_FREE,
		.uuid = (const uint8_t *)"uuid of a subvol",
		.emit = emit_files,
		.context = listing,
	};
	struct image image = { 0 };
	int ret;

	ret = image_init(&image, &params);
	if (!ret)
		ret = add_chunks(&image);
	if (!ret)
		ret = image_build_tree(&image, &files);
	if (!ret)
		ret = image_commit(&image);
	image_deinit(&image);
	return ret;
}

int main(int argc, char **argv)
{
	struct listing listing = { 0 };
	_cleanup_close_ int fd = -1;
	int ret;

	message_init("format-image");
	if (argc != 3) {
		msg_error("FILES and OUTPUT are needed");
		return EXIT_USAGE;
	}
	fd = open(argv[2], O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
	if (fd < 0 || ftruncate(fd, DEVICE_BYTES)) {
		msg_error("%s: %s", argv[2], strerror(errno));
		return EXIT_FAILED;
	}
	ret = listing_fill(&listing, strtoul(argv[1], NULL, 10));
	if (!ret)
		ret = write_image(&listing, fd);
	if (ret)
		msg_error("%s", strerror(-ret));
	free(listing.files);
	return ret ? EXIT_FAILED : EXIT_OK;
}
