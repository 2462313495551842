/* SPDX-License-Identifier: MIT */
/* Emits the chunk, device, root, UUID and data relocation trees. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/cleanup.h"
#include "btrfs/inode.h"
#include "btrfs/trees.h"

enum { DIR_MODE = 040755 };

void image_fill_device(const struct image *image, struct disk_device *device)
{
	uint64_t used = 0;

	for (size_t i = 0; i < image->chunks.count; i++)
		used += chunk_device_bytes(&image->chunks.chunks[i]);
	*device = (struct disk_device){
		.devid = htole64(CHUNK_DEVID),
		.total_bytes = htole64(image->params.device_bytes),
		.bytes_used = htole64(used),
		.io_align = htole32(SECTOR_BYTES),
		.io_width = htole32(SECTOR_BYTES),
		.sector_bytes = htole32(SECTOR_BYTES),
	};
	memcpy(device->uuid, image->params.device_uuid, UUID_BYTES);
	memcpy(device->fsid, image->params.fsid, UUID_BYTES);
}

int emit_chunk_tree(struct image *image, struct tree_builder *tree, void *context)
{
	struct key key = { OBJECT_DEV_ITEMS, KEY_DEV_ITEM, CHUNK_DEVID };
	struct disk_device device;
	int ret;

	image_fill_device(image, &device);
	ret = tree_add(tree, &key, &device, sizeof(device));
	for (size_t i = 0; i < image->chunks.count && !ret; i++) {
		const struct chunk *chunk = &image->chunks.chunks[i];
		uint8_t item[CHUNK_ITEM_MAX_BYTES];
		size_t size = chunk_encode(chunk, image->params.device_uuid, item);

		key = (struct key){ OBJECT_FIRST_CHUNK, KEY_CHUNK_ITEM, chunk->logical };
		ret = tree_add(tree, &key, item, size);
	}
	return ret;
}

struct device_extent {
	uint64_t offset;
	const struct chunk *chunk;
};

static int compare_device_extents(const void *left, const void *right)
{
	const struct device_extent *a = left, *b = right;

	return (a->offset > b->offset) - (a->offset < b->offset);
}

int emit_dev_tree(struct image *image, struct tree_builder *tree, void *context)
{
	_cleanup_free_ struct device_extent *extents =
		calloc(image->chunks.count * CHUNK_STRIPES_MAX + 1, sizeof(*extents));
	size_t count = 0;

	if (!extents)
		return -ENOMEM;
	for (size_t i = 0; i < image->chunks.count; i++) {
		const struct chunk *chunk = &image->chunks.chunks[i];

		for (unsigned s = 0; s < chunk->stripe_count; s++)
			extents[count++] = (struct device_extent){ chunk->stripes[s], chunk };
	}
	qsort(extents, count, sizeof(*extents), compare_device_extents);

	for (size_t i = 0; i < count; i++) {
		const struct chunk *chunk = extents[i].chunk;
		struct key key = { CHUNK_DEVID, KEY_DEV_EXTENT, extents[i].offset };
		struct disk_dev_extent item = {
			.chunk_tree = htole64(TREE_CHUNK),
			.chunk_objectid = htole64(OBJECT_FIRST_CHUNK),
			.chunk_offset = htole64(chunk->logical),
			.length = htole64(chunk->length),
		};
		int ret;

		if (i && extents[i].offset < extents[i - 1].offset + extents[i - 1].chunk->length)
			return -EINVAL; /* two chunks overlap on the device */
		memcpy(item.chunk_tree_uuid, image->params.chunk_tree_uuid, UUID_BYTES);
		ret = tree_add(tree, &key, &item, sizeof(item));
		if (ret)
			return ret;
	}
	return 0;
}

/* Emits the root tree's directory. Its one entry says which subvolume is mounted by default. */
static int emit_root_dir(struct image *image, struct tree_builder *tree)
{
	uint64_t generation = image->params.generation;
	struct disk_inode inode = inode_make(generation, image->params.time, DIR_MODE);
	struct dir_entry entry = {
		.name = "default",
		.length = strlen("default"),
		.target = { TREE_FS, KEY_ROOT_ITEM, UINT64_MAX },
		.type = ENTRY_DIR,
	};
	int ret;

	if (image->params.default_subvolume)
		entry.target.objectid = image->params.default_subvolume;
	inode.byte_count = htole64(image->params.node_bytes);
	ret = inode_add(tree, TREE_ROOT_DIR, &inode);
	if (!ret)
		ret = inode_top_add(tree, TREE_ROOT_DIR);
	/* Here the one entry has no index. */
	return ret ?: dir_hashes_add(tree, TREE_ROOT_DIR, &entry, 1);
}

static int emit_root_item(struct image *image, struct tree_builder *tree,
			  const struct image_root *root)
{
	struct key key = { root->objectid, KEY_ROOT_ITEM, 0 };
	le64 generation = htole64(image->params.generation);
	struct disk_root item = {
		.inode = { .generation = htole64(1),
			   .size = htole64(3),
			   .byte_count = htole64(image->params.node_bytes),
			   .link_count = htole32(1),
			   .mode = htole32(DIR_MODE),
			   .flags = htole64(INODE_ROOT_ITEM_INIT) },
		.generation = generation,
		.top_inode = htole64(root->top_inode),
		.bytenr = htole64(root->tree.bytenr),
		.bytes_used = htole64(root->tree.block_count * image->params.node_bytes),
		.refs = htole32(1),
		.level = root->tree.level,
		.generation_v2 = generation,
	};

	if (root->read_only)
		item.flags = htole64(ROOT_READ_ONLY);
	/* The kernel takes blocks that are younger for the tree's own. */
	if (root->may_share && image->has_shared)
		item.last_snapshot = generation;
	if (root->has_uuid) {
		memcpy(item.uuid, root->uuid, UUID_BYTES);
		item.ctransid = item.otransid = generation;
		item.ctime = item.otime = time_make(image->params.time, 0);
	}
	return tree_add(tree, &key, &item, sizeof(item));
}

static int emit_root_ref(struct tree_builder *tree, const struct key *key,
			 const struct image_place *place)
{
	uint8_t item[sizeof(struct disk_root_ref) + NAME_MAX_BYTES];
	size_t length = strlen(place->name);
	struct disk_root_ref ref = {
		.directory = htole64(place->directory),
		.sequence = htole64(place->index),
		.name_length = htole16((uint16_t)length),
	};

	if (length > NAME_MAX_BYTES)
		return -ENAMETOOLONG;
	memcpy(item, &ref, sizeof(ref));
	memcpy(item + sizeof(ref), place->name, length);
	return tree_add(tree, key, item, sizeof(ref) + length);
}

/* Emits the references from a subvolume to its parent, and to the subvolumes in it. */
static int emit_root_refs(const struct image *image, struct tree_builder *tree,
			  const struct image_root *root)
{
	struct key key = { root->objectid, KEY_ROOT_BACKREF, root->place.parent };
	int ret = root->place.parent ? emit_root_ref(tree, &key, &root->place) : 0;

	key.type = KEY_ROOT_REF;
	for (size_t i = 0; i < image->root_count && !ret; i++) {
		const struct image_root *child = &image->roots[i];

		key.offset = child->objectid;
		if (child->place.parent == root->objectid)
			ret = emit_root_ref(tree, &key, &child->place);
	}
	return ret;
}

int emit_root_tree(struct image *image, struct tree_builder *tree, void *context)
{
	bool dir_done = false;

	for (size_t i = 0; i < image->root_count; i++) {
		const struct image_root *root = &image->roots[i];
		int ret = 0;

		/* These two have no root item, as the superblock points to them. */
		if (root->objectid == TREE_ROOT || root->objectid == TREE_CHUNK)
			continue;
		if (root->objectid > TREE_ROOT_DIR && !dir_done) {
			ret = emit_root_dir(image, tree);
			dir_done = true;
		}
		if (!ret)
			ret = emit_root_item(image, tree, root);
		if (!ret)
			ret = emit_root_refs(image, tree, root);
		if (ret)
			return ret;
	}
	return 0;
}

struct uuid_entry {
	struct key key;
	uint64_t objectid;
};

static int compare_uuid_entries(const void *left, const void *right)
{
	const struct uuid_entry *a = left, *b = right;

	return key_compare(&a->key, &b->key);
}

/* Maps each subvolume's UUID, as the two halves of a key, to the subvolume's object id. */
int emit_uuid_tree(struct image *image, struct tree_builder *tree, void *context)
{
	_cleanup_free_ struct uuid_entry *entries = calloc(image->root_count, sizeof(*entries));
	size_t count = 0;

	if (!entries)
		return -ENOMEM;
	for (size_t i = 0; i < image->root_count; i++) {
		const struct image_root *root = &image->roots[i];
		le64 halves[2];

		if (!root->has_uuid)
			continue;
		memcpy(halves, root->uuid, UUID_BYTES);
		entries[count++] = (struct uuid_entry){
			.key = { le64toh(halves[0]), KEY_UUID_SUBVOL, le64toh(halves[1]) },
			.objectid = root->objectid,
		};
	}
	qsort(entries, count, sizeof(entries[0]), compare_uuid_entries);
	for (size_t i = 0; i < count; i++) {
		le64 value = htole64(entries[i].objectid);
		int ret = tree_add(tree, &entries[i].key, &value, sizeof(value));

		if (ret)
			return ret;
	}
	return 0;
}

/* Emits a tree that the kernel's balance uses. Mounting demands that it has a top directory. */
int emit_data_reloc_tree(struct image *image, struct tree_builder *tree, void *context)
{
	struct disk_inode inode =
		inode_make(image->params.generation, image->params.time, DIR_MODE);
	int ret;

	ret = inode_add(tree, OBJECT_FIRST_FREE, &inode);
	if (!ret)
		ret = inode_top_add(tree, OBJECT_FIRST_FREE);
	return ret;
}
