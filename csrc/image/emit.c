/* SPDX-License-Identifier: MIT */
#include "image/emit.h"

#include <errno.h>
#include <openssl/evp.h>
#include <stdlib.h>
#include <string.h>
#include <uuid/uuid.h>

#include "btrfs/csumtree.h"
#include "btrfs/image.h"
#include "btrfs/inode.h"
#include "btrfs/super.h"
#include "image/emit_inode.h"

enum {
	GENERATION = 1,
	SUBVOLUME_FIRST = OBJECT_FIRST_FREE,
	/* In the top-level subvolume. */
	LAYERS_INODE = OBJECT_FIRST_FREE + 1,
	LINK_INODE,
	LAYERS_INDEX = DIR_INDEX_FIRST,
	LINK_INDEX,
	DIRECTORY_MODE = 040755,
	LINK_MODE = 0120777,
};

#define LAYERS_NAME "layers"
#define LINK_NAME "rootfs"
#define SYSTEM_BYTES MIB(4)
/* Room for the metadata until their size is known: as much as lies before the last mirror. */
#define METADATA_AMPLE_BYTES GIB(128)

struct emit {
	struct emit_params params;
	struct image image;
	const char **layers; /* names */
	size_t layer_count;
	uint64_t metadata_start;
	struct tree_shape shape; /* of the layer before */
};

static int fail(struct error *error, int err)
{
	if (err == -ENOSPC)
		return error_set(error, err, "cannot write the metadata: no space is left");
	return error_set(error, err, "cannot write the metadata: %s", strerror(-err));
}

static int add_chunks(struct emit *emit)
{
	struct chunk chunks[] = {
		{ .length = SYSTEM_BYTES, .type = CHUNK_SYSTEM },
		{ .length = METADATA_AMPLE_BYTES, .type = CHUNK_METADATA },
		{ .length = CHUNK_LENGTH_MAX, .type = CHUNK_DATA },
	};
	uint64_t end = 0;
	int ret = 0;

	for (size_t i = 0; i < sizeof(chunks) / sizeof(chunks[0]) && !ret; i++) {
		struct chunk *chunk = &chunks[i];

		chunk->logical = chunk->type == CHUNK_DATA ? IMAGE_DATA_START :
							     chunk_place(end, chunk->length);
		chunk->stripes[0] = chunk->logical;
		chunk->stripe_count = 1;
		end = chunk->logical + chunk->length;
		ret = image_add_chunk(&emit->image, chunk);
	}
	emit->metadata_start = chunks[1].logical;
	return ret;
}

int emit_open(struct emit **made, const struct emit_params *params, struct error *error)
{
	struct emit *emit = calloc(1, sizeof(*emit));
	struct image_params image = {
		.fd = params->fd,
		.node_bytes = DEFAULT_NODE_BYTES,
		.device_bytes = IMAGE_DATA_START + CHUNK_LENGTH_MAX,
		.super_flags = SUPER_SEEDING,
		.generation = GENERATION,
		.time = params->time,
		.label = params->label,
		.csum_type = params->csum->id,
		.has_zstd = params->has_zstd,
	};
	int ret;

	*made = emit;
	if (!emit)
		return error_set(error, -ENOMEM, "no memory");
	emit->params = *params;
	ret = image_init(&emit->image, &image);
	if (!ret)
		ret = add_chunks(emit);
	return ret ? fail(error, ret) : 0;
}

void emit_close(struct emit *emit)
{
	if (!emit)
		return;
	image_deinit(&emit->image);
	tree_shape_deinit(&emit->shape);
	free(emit->layers);
	free(emit);
}

/* The context of a layer's tree; that of its emission comes first. */
struct layer_tree {
	struct emit_tree emit;
	struct image *image;
	EVP_MD_CTX *digest; /* of its blocks; NULL: none is wanted */
};

static int emit_layer_tree(struct image *image, struct tree_builder *builder, void *context)
{
	struct layer_tree *tree = context;

	return emit_tree(image, builder, &tree->emit);
}

/* Adds the references that a leaf has to extents of data. Those that share it have none. */
static int add_references(struct image *image, const struct disk_header *leaf)
{
	const struct disk_item *items = (const struct disk_item *)(leaf + 1);
	int ret = 0;

	for (uint32_t i = 0; i < le32toh(leaf->item_count) && !ret; i++) {
		const struct disk_file_extent *file =
			(const void *)((const uint8_t *)(leaf + 1) + le32toh(items[i].offset));
		struct extent extent = {
			.root = le64toh(leaf->owner),
			.objectid = le64toh(items[i].key.objectid),
			.offset = le64toh(items[i].key.offset),
			.count = 1,
			.is_data = true,
		};

		if (items[i].key.type != KEY_EXTENT_DATA || file->type == FILE_EXTENT_INLINE)
			continue;
		extent.start = le64toh(file->disk_bytenr);
		extent.length = le64toh(file->disk_bytes);
		ret = image_add_data(image, &extent);
	}
	return ret;
}

static int layer_block_written(void *context, const void *block)
{
	const struct layer_tree *tree = context;
	const struct disk_header *header = block;

	if (tree->digest && !EVP_DigestUpdate(tree->digest, block, DEFAULT_NODE_BYTES))
		return -ENOMEM;
	return header->level ? 0 : add_references(tree->image, header);
}

static int begin_digest(struct layer_tree *tree, const struct data *data)
{
	uint8_t content[DATA_DIGEST_BYTES];
	int ret = data_digest(data, content);

	if (ret)
		return ret;
	tree->digest = EVP_MD_CTX_new();
	return tree->digest && EVP_DigestInit_ex(tree->digest, EVP_sha256(), NULL) &&
			       EVP_DigestUpdate(tree->digest, content, sizeof(content)) ?
		       0 :
		       -ENOMEM;
}

int emit_layer(struct emit *emit, const struct model *model, struct data *data, uint64_t *subvolume,
	       uint8_t *digest, struct error *error)
{
	const char **layers =
		reallocarray(emit->layers, emit->layer_count + 1, sizeof(*emit->layers));
	struct layer_tree context = {
		.emit = { .model = model,
			  .data = data,
			  .data_start = IMAGE_DATA_START,
			  .error = error },
		.image = &emit->image,
	};
	struct image_tree tree = {
		.top_inode = OBJECT_FIRST_FREE,
		.read_only = true,
		.place = { .parent = TREE_FS,
			   .directory = LAYERS_INODE,
			   .index = DIR_INDEX_FIRST + emit->layer_count },
		.emit = emit_layer_tree,
		.written = layer_block_written,
		.shape = &emit->shape,
		.context = &context,
	};
	int ret = 0;

	if (!layers)
		return error_set(error, -ENOMEM, "no memory");
	emit->layers = layers;
	tree.objectid = *subvolume = SUBVOLUME_FIRST + emit->layer_count;
	layers[emit->layer_count++] = NULL;
	if (digest)
		ret = begin_digest(&context, data);
	if (!ret)
		ret = image_build_tree(&emit->image, &tree);
	if (!ret && digest && !EVP_DigestFinal_ex(context.digest, digest, NULL))
		ret = -ENOMEM;
	emit_tree_deinit(&context.emit);
	EVP_MD_CTX_free(context.digest);
	if (ret && !context.emit.has_error)
		fail(error, ret);
	return ret;
}

void emit_name(struct emit *emit, uint64_t subvolume, const char *name)
{
	emit->layers[subvolume - SUBVOLUME_FIRST] = name;
	image_set_name(&emit->image, subvolume, name);
}

/* ---- The top-level subvolume ---- */

static int emit_directory(struct tree_builder *tree, const struct emit *emit, uint64_t number,
			  struct inode_name *name, struct dir_entry *entries, size_t count)
{
	struct disk_inode inode = inode_make(GENERATION, emit->params.time, DIRECTORY_MODE);
	uint64_t name_bytes = 0;
	int ret;

	for (size_t i = 0; i < count; i++)
		name_bytes += entries[i].length;
	inode.size = htole64(2 * name_bytes);
	ret = inode_add(tree, number, &inode);
	if (!ret)
		ret = name ? inode_names_add(tree, number, name, 1) : inode_top_add(tree, number);
	return ret ?: dir_entries_add(tree, number, entries, count);
}

static int emit_layers(struct tree_builder *tree, const struct emit *emit)
{
	struct inode_name name = { OBJECT_FIRST_FREE, LAYERS_INDEX, LAYERS_NAME,
				   strlen(LAYERS_NAME) };
	struct dir_entry *entries = calloc(emit->layer_count + 1, sizeof(*entries));
	int ret;

	if (!entries)
		return -ENOMEM;
	for (size_t i = 0; i < emit->layer_count; i++) {
		entries[i] = (struct dir_entry){
			.name = emit->layers[i],
			.length = strlen(emit->layers[i]),
			.target = { SUBVOLUME_FIRST + i, KEY_ROOT_ITEM, UINT64_MAX },
			.index = DIR_INDEX_FIRST + i,
			.type = ENTRY_DIR,
		};
	}
	ret = emit_directory(tree, emit, LAYERS_INODE, &name, entries, emit->layer_count);
	free(entries);
	return ret;
}

static int emit_link(struct tree_builder *tree, const struct emit *emit)
{
	struct inode_name name = { OBJECT_FIRST_FREE, LINK_INDEX, LINK_NAME, strlen(LINK_NAME) };
	struct disk_inode inode = inode_make(GENERATION, emit->params.time, LINK_MODE);
	char target[sizeof(LAYERS_NAME "/") + NAME_MAX_BYTES];
	int length = snprintf(target, sizeof(target), LAYERS_NAME "/%s",
			      emit->layers[emit->layer_count - 1]);
	int ret;

	inode.size = inode.byte_count = htole64((uint64_t)length);
	ret = inode_add(tree, LINK_INODE, &inode);
	if (!ret)
		ret = inode_names_add(tree, LINK_INODE, &name, 1);
	return ret ?: file_inline_add(tree, LINK_INODE, target, length, length, 0);
}

static int emit_top_level(struct image *image, struct tree_builder *tree, void *context)
{
	const struct emit *emit = context;
	struct dir_entry entries[] = {
		{ .name = LAYERS_NAME,
		  .length = strlen(LAYERS_NAME),
		  .target = { LAYERS_INODE, KEY_INODE_ITEM, 0 },
		  .index = LAYERS_INDEX,
		  .type = ENTRY_DIR },
		{ .name = LINK_NAME,
		  .length = strlen(LINK_NAME),
		  .target = { LINK_INODE, KEY_INODE_ITEM, 0 },
		  .index = LINK_INDEX,
		  .type = ENTRY_SYMLINK },
	};
	int ret;

	ret = emit_directory(tree, emit, OBJECT_FIRST_FREE, NULL, entries, 2);
	if (!ret)
		ret = emit_layers(tree, emit);
	return ret ?: emit_link(tree, emit);
}

/* ---- The checksums ---- */

struct csums {
	struct data *data;
	uint64_t first_sector;
};

static int read_csums(void *context, uint64_t first, void *csums, size_t bytes)
{
	const struct csums *from = context;

	return data_read_csums(from->data, from->first_sector + first, csums, bytes);
}

/* Of what lies between gaps. */
static int emit_csums(struct image *image, struct tree_builder *tree, void *context)
{
	struct csums from = { .data = context };
	size_t count;
	const struct data_gap *gaps = data_gaps(context, &count);
	uint64_t at = 0;
	int ret = 0;

	for (size_t i = 0; i <= count && !ret; i++) {
		uint64_t end = i < count ? gaps[i].offset : data_counts(context)->object_bytes;

		from.first_sector = at / SECTOR_BYTES;
		ret = csum_items_add(tree, IMAGE_DATA_START + at, (end - at) / SECTOR_BYTES,
				     read_csums, &from);
		at = i < count ? end + gaps[i].bytes : end;
	}
	return ret;
}

/* ---- The end ---- */

static int digest_block(void *context, const void *block)
{
	return EVP_DigestUpdate(context, block, DEFAULT_NODE_BYTES) ? 0 : -ENOMEM;
}

static int digest_data(EVP_MD_CTX *context, struct data *data)
{
	uint8_t digest[DATA_DIGEST_BYTES];
	int ret = 0;

	for (uint64_t i = 0; i < data_counts(data)->digests && !ret; i++) {
		ret = data_read_digests(data, i, digest, sizeof(digest));
		if (!ret && !EVP_DigestUpdate(context, digest, sizeof(digest)))
			ret = -ENOMEM;
	}
	return ret;
}

/* Derives the UUID of the file system from all that is in it: equal content, equal images. */
static int derive_fsid(struct emit *emit, struct data *data, uint8_t *fsid)
{
	EVP_MD_CTX *context = EVP_MD_CTX_new();
	le64 time = htole64((uint64_t)emit->params.time);
	const char *label = emit->params.label;
	uint8_t digest[DATA_DIGEST_BYTES];
	int ret = -ENOMEM;

	if (context && EVP_DigestInit_ex(context, EVP_sha256(), NULL) &&
	    EVP_DigestUpdate(context, &time, sizeof(time)) &&
	    EVP_DigestUpdate(context, label, strlen(label) + 1))
		ret = image_visit_blocks(&emit->image, digest_block, context);
	if (!ret)
		ret = digest_data(context, data);
	if (!ret && !EVP_DigestFinal_ex(context, digest, NULL))
		ret = -ENOMEM;
	EVP_MD_CTX_free(context);
	if (ret)
		return ret;
	memcpy(fsid, digest, UUID_BYTES);
	/* Version 8 of RFC 9562: what the others are is our affair. */
	fsid[6] = (fsid[6] & 0x0f) | 0x80;
	fsid[8] = (fsid[8] & 0x3f) | 0x80;
	return 0;
}

static int set_identity(struct emit *emit, const uint8_t *fsid)
{
	uint8_t device[UUID_BYTES], chunks[UUID_BYTES], uuid[UUID_BYTES];
	int ret;

	uuid_generate_sha1(device, fsid, "device", 6);
	uuid_generate_sha1(chunks, fsid, "chunk-tree", 10);
	uuid_generate_sha1(uuid, fsid, "top-level", 9);
	ret = image_set_identity(&emit->image, fsid, device, chunks);
	if (!ret)
		ret = image_set_uuid(&emit->image, TREE_FS, uuid);
	for (size_t i = 0; i < emit->layer_count && !ret; i++) {
		uint64_t objectid = SUBVOLUME_FIRST + i;
		le64 disk = htole64(objectid);

		uuid_generate_sha1(uuid, fsid, (const char *)&disk, sizeof(disk));
		ret = image_set_uuid(&emit->image, objectid, uuid);
	}
	return ret;
}

/* Gives chunks and device the sizes that they need. */
static int trim(struct emit *emit, uint64_t object_bytes)
{
	uint64_t data_bytes = round_up_u64(object_bytes ? object_bytes : 1, IMAGE_DATA_STEP_BYTES);
	int ret = image_trim_chunk(&emit->image, IMAGE_DATA_START, data_bytes);

	if (!ret)
		ret = image_trim_device(&emit->image, IMAGE_DATA_START + data_bytes);
	return ret ?: image_trim_metadata(&emit->image);
}

int emit_finish(struct emit *emit, struct data *data, struct emit_result *result,
		struct error *error)
{
	struct image *image = &emit->image;
	struct image_tree top = {
		.objectid = TREE_FS,
		.top_inode = OBJECT_FIRST_FREE,
		.emit = emit_top_level,
		.context = emit,
	};
	struct image_tree csums = { .objectid = TREE_CSUM, .emit = emit_csums, .context = data };
	unsigned mirrors;
	int ret;

	ret = image_build_tree(image, &top);
	if (!ret)
		ret = image_build_tree(image, &csums);
	if (!ret)
		ret = trim(emit, data_counts(data)->object_bytes);
	if (!ret)
		ret = derive_fsid(emit, data, result->fsid);
	if (!ret)
		ret = set_identity(emit, result->fsid);
	if (!ret)
		ret = image_commit(image);
	if (ret)
		return fail(error, ret);
	mirrors = super_mirror_count(image->params.device_bytes);
	result->device_bytes = image->params.device_bytes;
	result->local_bytes = super_mirror_offset(mirrors - 1) + SUPER_RESERVED_BYTES;
	result->metadata_bytes =
		(image->system_blocks + image->metadata_blocks) * DEFAULT_NODE_BYTES;
	return 0;
}
