/* SPDX-License-Identifier: MIT */
/*
 * read-image [--rewrite] IMAGE: lists the trees that the reader finds, one per line: object id,
 * items, blocks. It reads each tree with a cursor and with a walk, and looks up single items.
 * --rewrite writes every block and the superblocks back, which must change nothing.
 */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/cleanup.h"
#include "base/message.h"
#include "btrfs/cursor.h"
#include "btrfs/walk.h"

struct count {
	int rewrite_fd;
	uint64_t blocks;
	uint64_t items;
};

static int count_block(struct walk *walk, const struct block_expect *expect, void *block)
{
	struct count *count = walk->context;
	int ret = reader_compare_copies(walk->reader, expect, block);

	count->blocks++;
	if (!expect->level)
		count->items += block_count(block);
	if (!ret && count->rewrite_fd >= 0)
		ret = reader_write_block(walk->reader, count->rewrite_fd, expect->bytenr, block);
	return ret;
}

static int look_up(struct reader *reader, const struct block_expect *root, const struct key *key)
{
	_cleanup_(cursor_close) struct cursor cursor = { 0 };
	struct key absent = { key->objectid, key->type, key->offset + 1 };
	int ret;

	cursor_init(&cursor, reader, root);
	ret = cursor_find(&cursor, key);
	if (ret)
		return ret;
	/* The next item, if there is one, must have a greater key. */
	ret = cursor_seek(&cursor, &absent);
	if (ret > 0 && key_compare(&cursor.key, key) <= 0)
		ret = reader_fail(reader, -EINVAL, "a search ended too early");
	return ret < 0 ? ret : 0;
}

static int read_tree(struct reader *reader, const struct block_expect *root, int rewrite_fd)
{
	_cleanup_(cursor_close) struct cursor cursor = { 0 };
	struct count count = { .rewrite_fd = rewrite_fd };
	struct walk walk = { .reader = reader, .visit = count_block, .context = &count };
	uint64_t items = 0;
	int ret;

	cursor_init(&cursor, reader, root);
	for (ret = cursor_first(&cursor); ret > 0; ret = cursor_next(&cursor)) {
		struct key key = cursor.key;

		/* Look up only some items, as each look-up starts at the root. */
		if (items++ % 97 == 0) {
			ret = look_up(reader, root, &key);
			if (ret)
				return ret;
		}
	}
	if (!ret)
		ret = tree_walk(&walk, root);
	if (!ret && items != count.items)
		ret = reader_fail(reader, -EINVAL,
				  "a cursor sees %" PRIu64 " items, a walk %" PRIu64, items,
				  count.items);
	if (!ret)
		printf("%" PRIu64 " %" PRIu64 " %" PRIu64 "\n", root->tree, items, count.blocks);
	return ret;
}

static int read_all(struct reader *reader, int rewrite_fd)
{
	_cleanup_(cursor_close) struct cursor cursor = { 0 };
	struct block_expect root;
	int ret;

	tree_root_of_super(reader, TREE_CHUNK, &root);
	ret = read_tree(reader, &root, rewrite_fd);
	if (ret)
		return ret;
	tree_root_of_super(reader, TREE_ROOT, &root);
	ret = read_tree(reader, &root, rewrite_fd);
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
			ret = read_tree(reader, &tree, rewrite_fd);
		if (ret)
			return ret;
	}
	if (!ret && rewrite_fd >= 0) {
		struct disk_super super = reader->super;

		ret = reader_write_super(reader, rewrite_fd, &super);
	}
	return ret;
}

int main(int argc, char **argv)
{
	bool rewrite = argc == 3 && !strcmp(argv[1], "--rewrite");
	_cleanup_close_ int fd = -1;
	struct reader reader;
	int ret;

	message_init("read-image");
	if (argc != 2 + rewrite) {
		msg_error("usage: read-image [--rewrite] IMAGE");
		return EXIT_USAGE;
	}
	fd = open(argv[argc - 1], (rewrite ? O_RDWR : O_RDONLY) | O_CLOEXEC);
	if (fd < 0) {
		msg_error("%s: %s", argv[argc - 1], strerror(errno));
		return EXIT_FAILED;
	}
	ret = reader_open(&reader, fd);
	if (!ret) {
		for (int i = 0; i < SUPER_MIRRORS; i++)
			printf("mirror %" PRIu64 " %d %s\n", reader.mirrors[i].offset,
			       reader.mirrors[i].state, reader.mirrors[i].problem);
		ret = read_all(&reader, rewrite ? fd : -1);
		reader_close(&reader);
	}
	if (ret)
		msg_error("%s", reader.error);
	return ret ? EXIT_FAILED : EXIT_OK;
}
