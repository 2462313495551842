/* SPDX-License-Identifier: MIT */
#include "physmap/search.h"

#include <errno.h>
#include <linux/btrfs.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>

/* The kernel fills at most 16 MiB; 2 MiB hold some 24,000 file extents, so calls are few. */
#ifndef TREE_SEARCH_BUFFER_BYTES
#define TREE_SEARCH_BUFFER_BYTES (2 << 20)
#endif
enum { BUFFER_BYTES = TREE_SEARCH_BUFFER_BYTES };

int tree_search_init(struct tree_search *search, int fd, uint64_t tree, uint64_t objectid,
		     uint32_t type)
{
	*search = (struct tree_search){
		.fd = fd,
		.tree = tree,
		.objectid = objectid,
		.type = type,
		.args = malloc(sizeof(*search->args) + BUFFER_BYTES),
	};
	return search->args ? 0 : -ENOMEM;
}

void tree_search_deinit(struct tree_search *search)
{
	free(search->args);
	search->args = NULL;
}

static int fill(struct tree_search *search)
{
	struct btrfs_ioctl_search_args_v2 *args = search->args;

	args->key = (struct btrfs_ioctl_search_key){
		.tree_id = search->tree,
		.min_objectid = search->objectid,
		.max_objectid = search->objectid,
		.min_type = search->type,
		.max_type = search->type,
		.min_offset = search->next_offset,
		.max_offset = UINT64_MAX,
		.max_transid = UINT64_MAX,
		.nr_items = UINT32_MAX,
	};
	args->buf_size = BUFFER_BYTES;
	if (ioctl(search->fd, BTRFS_IOC_TREE_SEARCH_V2, args) < 0)
		return -errno;
	search->position = 0;
	search->left = args->key.nr_items;
	/* NB: the kernel does not tell a full buffer from the end. An empty answer is the end. */
	search->finished = !search->left;
	return 0;
}

int tree_search_next(struct tree_search *search, struct tree_item *item)
{
	struct btrfs_ioctl_search_header header;
	const char *data;
	int ret;

	if (!search->left && !search->finished) {
		ret = fill(search);
		if (ret < 0)
			return ret;
	}
	if (search->finished)
		return 0;

	/* Headers follow item data of any length, so they are not aligned. */
	data = (const char *)search->args->buf + search->position;
	if (search->position + sizeof(header) > BUFFER_BYTES)
		return -EUCLEAN;
	memcpy(&header, data, sizeof(header));
	if (header.len > BUFFER_BYTES - sizeof(header) - search->position)
		return -EUCLEAN;
	*item = (struct tree_item){
		.offset = header.offset,
		.data = data + sizeof(header),
		.length = header.len,
	};
	search->position += sizeof(header) + header.len;
	search->left--;
	if (header.offset == UINT64_MAX && !search->left)
		search->finished = true;
	search->next_offset = header.offset + 1;
	return 1;
}
