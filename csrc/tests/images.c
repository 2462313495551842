/* SPDX-License-Identifier: MIT */
#include "tests/images.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/cleanup.h"
#include "base/fileio.h"
#include "base/message.h"
#include "btrfs/cursor.h"
#include "btrfs/super.h"

enum {
	PIECES_MAX = 200,
	COPY_BYTES_MAX = 64,
};

/* A superblock or a copy of a tree block. */
struct piece {
	uint64_t offset; /* in the image */
	uint32_t length;
	uint8_t *clean;
	uint8_t *changed;
	bool is_dirty;
};

struct target {
	int fd; /* a copy of the image, in memory */
	uint64_t file_bytes;
	struct piece pieces[PIECES_MAX];
	size_t piece_count;
	uint64_t values[2 * PIECES_MAX]; /* that have a meaning in this image */
	size_t value_count;
};

static void die(const char *what, int error_number)
{
	msg_error("%s: %s", what, strerror(-error_number));
	exit(EXIT_FAILED);
}

static void add_value(struct target *target, uint64_t value)
{
	if (target->value_count < sizeof(target->values) / sizeof(target->values[0]))
		target->values[target->value_count++] = value;
}

static int add_piece(struct target *target, uint64_t offset, uint32_t length)
{
	struct piece *piece = &target->pieces[target->piece_count];

	if (target->piece_count == PIECES_MAX || offset + length > target->file_bytes)
		return 0;
	piece->offset = offset;
	piece->length = length;
	piece->clean = malloc(length);
	piece->changed = malloc(length);
	if (!piece->clean || !piece->changed)
		return -ENOMEM;
	target->piece_count++;
	return pread_full(target->fd, piece->clean, length, offset);
}

/* Adds a block and all below it. Recursion is only as deep as the tree is high. */
static int add_tree(struct target *target, struct reader *reader, const struct block_expect *expect)
{
	_cleanup_free_ void *block = malloc(reader->node_bytes);
	int ret = block ? reader_read_block(reader, expect, block) : -ENOMEM;
	const struct chunk *chunk = reader_map(reader, expect->bytenr, 1);

	if (ret)
		return ret;
	add_value(target, expect->bytenr);
	ret = add_piece(target, chunk->stripes[0] + (expect->bytenr - chunk->logical),
			reader->node_bytes);
	for (uint32_t i = 0; expect->level && i < block_count(block) && !ret; i++) {
		struct block_expect child = block_child(expect, block, i);

		ret = add_tree(target, reader, &child);
	}
	return ret;
}

static int add_trees(struct target *target, struct reader *reader)
{
	_cleanup_(cursor_close) struct cursor cursor = { 0 };
	struct block_expect root;
	int ret;

	tree_root_of_super(reader, TREE_CHUNK, &root);
	ret = add_tree(target, reader, &root);
	tree_root_of_super(reader, TREE_ROOT, &root);
	if (!ret)
		ret = add_tree(target, reader, &root);
	if (ret)
		return ret;
	cursor_init(&cursor, reader, &root);
	for (ret = cursor_first(&cursor); ret > 0; ret = cursor_next(&cursor)) {
		struct block_expect tree;
		struct disk_root item;

		if (cursor.key.type != KEY_ROOT_ITEM)
			continue;
		ret = tree_root_of_item(&cursor, &item, &tree);
		if (!ret)
			ret = add_tree(target, reader, &tree);
		if (ret)
			return ret;
	}
	return ret;
}

/* Copies the file, but not its holes. */
static int copy_file(struct target *target, int from)
{
	static uint8_t buffer[65536];
	off_t at = 0, end = lseek(from, 0, SEEK_END);
	int ret = 0;

	target->file_bytes = (uint64_t)end;
	target->fd = memfd_create("image", MFD_CLOEXEC);
	if (target->fd < 0 || ftruncate(target->fd, end))
		return -errno;
	while (!ret && (at = lseek(from, at, SEEK_DATA)) >= 0) {
		off_t hole = lseek(from, at, SEEK_HOLE);

		for (; at < hole && !ret; at += (off_t)sizeof(buffer)) {
			size_t part = sizeof(buffer);

			if ((uint64_t)(hole - at) < part)
				part = (size_t)(hole - at);
			ret = pread_full(from, buffer, part, (uint64_t)at);
			if (!ret)
				ret = pwrite_full(target->fd, buffer, part, (uint64_t)at);
		}
		at = hole;
	}
	return ret;
}

static int load(struct target *target, const char *path)
{
	_cleanup_close_ int from = open(path, O_RDONLY | O_CLOEXEC);
	struct reader reader;
	int ret = from < 0 ? -errno : copy_file(target, from);

	if (!ret)
		ret = reader_open(&reader, target->fd);
	if (ret)
		return ret;
	add_value(target, reader.file_bytes);
	add_value(target, reader.device_bytes);
	for (size_t i = 0; i < reader.chunks.count && i < PIECES_MAX; i++)
		add_value(target, reader.chunks.chunks[i].logical);
	for (unsigned i = 0; i < SUPER_MIRRORS && !ret; i++)
		ret = add_piece(target, super_mirror_offset(i), SUPER_BYTES);
	if (!ret)
		ret = add_trees(target, &reader);
	reader_close(&reader);
	return ret || target->piece_count ? ret : -EINVAL;
}

static uint64_t interesting(const struct target *target, struct fuzz_input *input)
{
	static const uint64_t values[] = {
		0,
		1,
		2,
		7,
		8,
		16,
		101,
		255,
		256,
		4095,
		4096,
		4097,
		16283,
		16384,
		65535,
		65536,
		UINT32_MAX,
		1u << 31,
		1ull << 32,
		1ull << 48,
		INT64_MAX,
		1ull << 63,
		UINT64_MAX - 4095,
		UINT64_MAX,
	};
	size_t count = sizeof(values) / sizeof(values[0]);
	uint64_t which = fuzz_take(input, 1);

	if (which % 2)
		return target->values[which / 2 % target->value_count] + fuzz_take(input, 1) % 3 -
		       1;
	return values[which / 2 % count];
}

/* Chooses an offset: in a tree block's header, items, item data, or anywhere. */
static uint32_t place_in(const struct piece *piece, struct fuzz_input *input)
{
	uint64_t kind = fuzz_take(input, 1), at = fuzz_take(input, 2);
	const struct disk_header *header = (const void *)piece->clean;
	bool is_tree = piece->length != SUPER_BYTES;
	uint64_t count = is_tree ? le32toh(header->item_count) : 0;

	if (!is_tree && kind % 2)
		return at % 900; /* superblock: fields, and the first chunks */
	if (!is_tree || kind % 4 == 0 || !count)
		return at % piece->length;
	if (kind % 4 == 1)
		return at % sizeof(*header);
	if (kind % 4 == 2 || header->level)
		return sizeof(*header) +
		       at % (count * (header->level ? sizeof(struct disk_key_ptr) :
						      sizeof(struct disk_item)));
	{
		const struct disk_item *items = (const void *)(header + 1);
		const struct disk_item *item = &items[at / 64 % count];

		return sizeof(*header) + le32toh(item->offset) +
		       at % (le32toh(item->size) ? le32toh(item->size) : 1);
	}
}

static void change(struct target *target, struct fuzz_input *input)
{
	struct piece *piece = &target->pieces[fuzz_take(input, 1) % target->piece_count];
	const struct piece *other;
	uint32_t at = place_in(piece, input), width = 1, from;
	uint64_t kind = fuzz_take(input, 1), value;
	le64 disk = 0;

	if (!piece->is_dirty)
		memcpy(piece->changed, piece->clean, piece->length);
	piece->is_dirty = true;
	switch (kind % 5) {
	case 0:
		piece->changed[at] ^= 1 << fuzz_take(input, 1) % 8;
		return;
	case 1:
		width = 1u << kind / 5 % 4;
		value = interesting(target, input);
		break;
	case 2: /* a small step up or down */
		width = 1u << kind / 5 % 4;
		if (at + width > piece->length)
			return;
		memcpy(&disk, piece->changed + at, width);
		value = le64toh(disk) + fuzz_take(input, 1) % 17 - 8;
		break;
	case 3:
		other = &target->pieces[fuzz_take(input, 1) % target->piece_count];
		width = 1 + (uint32_t)fuzz_take(input, 1) % COPY_BYTES_MAX;
		from = place_in(other, input);
		if (at + width <= piece->length && from + width <= other->length)
			memmove(piece->changed + at, other->clean + from, width);
		return;
	default:
		width = 8;
		value = fuzz_take(input, 8);
		break;
	}
	disk = htole64(value);
	if (at + width <= piece->length)
		memcpy(piece->changed + at, &disk, width);
}

static void run_input(struct target *target, const uint8_t *data, size_t length,
		      void (*look)(int fd))
{
	const struct csum_kind *csum = csum_kind_by_id(CSUM_TYPE_CRC32C);
	struct fuzz_input input = { data, length };
	uint64_t how = fuzz_take(&input, 1), cut;
	int ret = 0;

	while (input.length)
		change(target, &input);
	for (size_t i = 0; i < target->piece_count && !ret; i++) {
		struct piece *piece = &target->pieces[i];

		if (!piece->is_dirty)
			continue;
		if (how % 16 != 1)
			csum_block_set(csum, piece->changed, piece->length);
		ret = pwrite_full(target->fd, piece->changed, piece->length, piece->offset);
	}
	cut = target->pieces[how / 16 < target->piece_count ? how / 16 : 0].offset + how;
	if (!ret && how % 16 == 2 && ftruncate(target->fd, (off_t)cut))
		ret = -errno;
	if (ret)
		die("cannot change the image", ret);
	look(target->fd);

	if (how % 16 == 2 && ftruncate(target->fd, (off_t)target->file_bytes))
		die("cannot restore the image", -errno);
	for (size_t i = 0; i < target->piece_count && !ret; i++) {
		struct piece *piece = &target->pieces[i];

		if (piece->is_dirty || (how % 16 == 2 && piece->offset + piece->length > cut))
			ret = pwrite_full(target->fd, piece->clean, piece->length, piece->offset);
		piece->is_dirty = false;
	}
	if (ret)
		die("cannot restore the image", ret);
}

static struct target target = { .fd = -1 };

void fuzz_image_load(const char *path)
{
	int ret;

	target = (struct target){ .fd = -1 };
	ret = load(&target, path);
	if (ret)
		die(path, ret);
}

void fuzz_image_change(const uint8_t *data, size_t length, void (*look)(int fd))
{
	run_input(&target, data, length, look);
}

void fuzz_image_free(void)
{
	close(target.fd);
	for (size_t i = 0; i < target.piece_count; i++) {
		free(target.pieces[i].clean);
		free(target.pieces[i].changed);
	}
}
