/* SPDX-License-Identifier: MIT */
/* Checks parts of the format library by themselves, and prints which check failed. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "base/cleanup.h"
#include "base/fileio.h"
#include "base/message.h"
#include "base/size.h"
#include "btrfs/image.h"
#include "btrfs/outfile.h"
#include "btrfs/seed.h"
#include "btrfs/super.h"

static int failures;

#define CHECK(condition)                                                                \
	do {                                                                            \
		if (!(condition)) {                                                     \
			msg_error("%s:%d: not so: %s", __func__, __LINE__, #condition); \
			failures++;                                                     \
		}                                                                       \
	} while (0)

static void check_crc32c(void)
{
	/* This is the check value of RFC 3720 and of CRC catalogues. */
	CHECK(~crc32c_raw(~0u, "123456789", 9) == 0xE3069283u);
	CHECK(crc32c_raw(5, "", 0) == 5);
	CHECK(csum_kind_by_id(CSUM_TYPE_CRC32C)->bytes == 4);
	CHECK(csum_kind_by_id(77) == NULL);
}

static void check_keys(void)
{
	struct key a = { 1, 2, 3 }, b = { 1, 2, UINT64_MAX }, c = { 1, 3, 0 }, d = { 2, 0, 0 };
	struct disk_key disk = key_to_disk(&b);
	struct key back = key_from_disk(&disk);

	CHECK(key_compare(&a, &b) < 0 && key_compare(&b, &c) < 0 && key_compare(&c, &d) < 0);
	CHECK(key_compare(&d, &a) > 0 && key_compare(&back, &b) == 0);
}

/* A sink that keeps the blocks in memory; the n-th one has address (n + 1) nodes. */
struct store {
	uint8_t *blocks;
	size_t count;
	uint32_t node_bytes;
};

static int store_place(void *context, unsigned level, uint64_t *bytenr)
{
	struct store *store = context;

	(void)level;
	store->blocks = reallocarray(store->blocks, ++store->count, store->node_bytes);
	*bytenr = store->count * store->node_bytes;
	return store->blocks ? 0 : -ENOMEM;
}

static int store_write(void *context, uint64_t bytenr, const void *block)
{
	struct store *store = context;

	memcpy(store->blocks + bytenr - store->node_bytes, block, store->node_bytes);
	return 0;
}

/* Items follow a pattern, so that a reader knows what the n-th has to be. */
static struct key nth_key(uint64_t n)
{
	return (struct key){ n / 7, (uint8_t)(n % 7), n * n };
}

static size_t nth_size(uint64_t n)
{
	return n % 50 * (n % 11);
}

static void check_leaf(const uint8_t *block, uint64_t *n)
{
	const struct disk_header *header = (const void *)block;
	const struct disk_item *items = (const void *)(header + 1);
	uint32_t end = DEFAULT_NODE_BYTES - sizeof(*header);

	for (uint32_t i = 0; i < le32toh(header->item_count); i++, ++*n) {
		struct key expected = nth_key(*n), found = key_from_disk(&items[i].key);
		size_t size = nth_size(*n);
		const uint8_t *data = (const uint8_t *)items + le32toh(items[i].offset);

		CHECK(key_compare(&expected, &found) == 0);
		CHECK(le32toh(items[i].size) == size && le32toh(items[i].offset) + size == end);
		for (size_t b = 0; b < size; b++)
			CHECK(data[b] == (uint8_t)*n);
		end -= (uint32_t)size;
	}
	CHECK((le32toh(header->item_count)) * sizeof(*items) <= end);
}

static void check_block(const struct store *store, const struct tree_format *format,
			uint64_t bytenr, unsigned level, uint64_t *n)
{
	const uint8_t *block = store->blocks + bytenr - store->node_bytes;
	const struct disk_header *header = (const void *)block;
	const struct disk_key_ptr *pointers = (const void *)(header + 1);

	CHECK(csum_block_matches(format->csum, block, format->node_bytes));
	CHECK(le64toh(header->bytenr) == bytenr && header->level == level);
	CHECK(le64toh(header->generation) == format->generation);
	if (!level) {
		check_leaf(block, n);
		return;
	}
	CHECK(header->item_count != 0);
	for (uint32_t i = 0; i < le32toh(header->item_count); i++) {
		struct key expected = nth_key(*n), found = key_from_disk(&pointers[i].key);

		CHECK(key_compare(&expected, &found) == 0);
		check_block(store, format, le64toh(pointers[i].bytenr), level - 1, n);
	}
}

static void check_tree(uint64_t count, unsigned level)
{
	struct tree_format format = {
		.node_bytes = DEFAULT_NODE_BYTES,
		.generation = 9,
		.csum = csum_kind_by_id(CSUM_TYPE_CRC32C),
	};
	struct store store = { .node_bytes = DEFAULT_NODE_BYTES };
	struct tree_sink sink = { store_place, store_write, &store };
	struct tree_builder tree;
	struct tree_root root;
	uint8_t data[1024];
	uint64_t n = 0;

	CHECK(tree_builder_init(&tree, &format, &sink, TREE_FS) == 0);
	for (uint64_t i = 0; i < count; i++) {
		struct key key = nth_key(i);

		memset(data, (int)i, sizeof(data));
		CHECK(tree_add(&tree, &key, data, nth_size(i)) == 0);
	}
	CHECK(tree_finish(&tree, &root) == 0);
	tree_builder_deinit(&tree);
	CHECK(root.level == level && root.block_count == store.count);
	check_block(&store, &format, root.bytenr, root.level, &n);
	CHECK(n == count);
	free(store.blocks);
}

static void check_tree_refusals(void)
{
	struct tree_format format = {
		.node_bytes = 4096,
		.csum = csum_kind_by_id(CSUM_TYPE_CRC32C),
	};
	struct store store = { .node_bytes = 4096 };
	struct tree_sink sink = { store_place, NULL, &store };
	struct key first = { 5, 5, 5 }, smaller = { 5, 5, 4 }, larger = { 5, 6, 0 };
	uint8_t data[4096] = { 0 };
	struct tree_builder tree;
	struct tree_root root;

	CHECK(tree_builder_init(&tree, &format, &sink, TREE_FS) == 0);
	CHECK(tree_add(&tree, &first, data, tree_item_max_bytes(&format) + 1) == -E2BIG);
	CHECK(tree_add(&tree, &first, data, tree_item_max_bytes(&format)) == 0);
	CHECK(tree_add(&tree, &first, data, 0) == -EINVAL);
	CHECK(tree_add(&tree, &smaller, data, 0) == -EINVAL);
	CHECK(tree_add(&tree, &larger, NULL, 0) == 0);
	CHECK(tree_finish(&tree, &root) == 0 && root.level == 1 && root.block_count == 3);
	tree_builder_deinit(&tree);
	free(store.blocks);
}

static void check_alloc(void)
{
	struct block_alloc alloc;
	struct block_alloc_mark mark;
	uint64_t bytenr;

	block_alloc_init(&alloc, 4096);
	CHECK(block_alloc_take(&alloc, &bytenr) == -ENOSPC);
	CHECK(block_alloc_add_range(&alloc, 1 << 20, 3 * 4096) == 0);
	CHECK(block_alloc_add_range(&alloc, 2 << 20, 2 * 4096) == 0);
	CHECK(block_alloc_take(&alloc, &bytenr) == 0 && bytenr == 1 << 20);
	mark = block_alloc_mark(&alloc);
	for (int i = 0; i < 2; i++, block_alloc_rewind(&alloc, mark)) {
		CHECK(block_alloc_take(&alloc, &bytenr) == 0 && bytenr == (1 << 20) + 4096);
		CHECK(block_alloc_take(&alloc, &bytenr) == 0 && bytenr == 2 << 20);
		CHECK(block_alloc_take(&alloc, &bytenr) == -ENOSPC);
	}
	block_alloc_deinit(&alloc);
}

static void check_chunks(void)
{
	struct chunk_list list = { 0 };
	struct chunk chunk = { MIB(1), MIB(4), CHUNK_SYSTEM, 1, { MIB(1) } };
	struct chunk bad = chunk;
	uint8_t array[SYS_CHUNK_ARRAY_BYTES], uuid[UUID_BYTES] = { 1 };

	CHECK(chunk_list_add(&list, &chunk) == 0);
	CHECK(chunk_list_add(&list, &chunk) == -EINVAL); /* overlaps */
	bad.logical = MIB(5);
	bad.length = CHUNK_LENGTH_MAX + STRIPE_LEN;
	CHECK(chunk_list_add(&list, &bad) == -EINVAL);
	bad.length = STRIPE_LEN + 4096;
	CHECK(chunk_list_add(&list, &bad) == -EINVAL);
	bad.length = STRIPE_LEN;
	bad.type = CHUNK_DATA | CHUNK_METADATA;
	CHECK(chunk_list_add(&list, &bad) == -EINVAL);
	bad.type = CHUNK_DATA | CHUNK_DUP;
	CHECK(chunk_list_add(&list, &bad) == -EINVAL); /* one stripe is missing */
	bad.type = CHUNK_DATA;
	CHECK(chunk_list_add(&list, &bad) == 0);
	CHECK(chunk_find(&list, MIB(1), MIB(4)) == &list.chunks[0]);
	CHECK(chunk_find(&list, MIB(4), MIB(2)) == NULL); /* in two chunks */
	CHECK(chunk_find(&list, MIB(5), 4096) == &list.chunks[1]);
	CHECK(chunk_find(&list, 0, 4096) == NULL && chunk_find(&list, GIB(1), 4096) == NULL);
	CHECK(chunk_encode_system(&list, uuid, array) == 17 + 48 + 32);
	for (uint64_t i = 0; i < 21; i++) {
		chunk.logical = GIB(1 + i);
		CHECK(chunk_list_add(&list, &chunk) == 0);
	}
	CHECK(chunk_encode_system(&list, uuid, array) == -EFBIG);
	chunk_list_deinit(&list);

	CHECK(chunk_place(0, MIB(4)) == MIB(1));
	CHECK(chunk_place(MIB(60), MIB(4)) == MIB(60));
	CHECK(chunk_place(MIB(60), MIB(4) + 1) == MIB(65));
	CHECK(chunk_place(MIB(64), 1) == MIB(65));
	CHECK(chunk_place(MIB(70), GIB(256)) == GIB(256) + MIB(1));
}

static void check_super(void)
{
	CHECK(super_mirror_count(KIB(64)) == 0 && super_mirror_count(KIB(68)) == 1);
	CHECK(super_mirror_count(GIB(256)) == 2 && super_mirror_count(GIB(257)) == 3);
}

/* Two references of one hash have one order, in whichever they were added. */
static void check_extent_order(void)
{
	static const struct extent refs[] = {
		{ GIB(1), 4096, TREE_FS, 257, 0, 1, 0, true },
		{ GIB(1), 4096, TREE_FS, 258, 0x93320cd5000, 1, 0, true },
	};

	CHECK(extent_data_ref_hash(&refs[0]) == extent_data_ref_hash(&refs[1]));
	for (unsigned first = 0; first < 2; first++) {
		struct extent_list list = { 0 };

		CHECK(!extent_list_add(&list, &refs[first]));
		CHECK(!extent_list_add(&list, &refs[!first]));
		extent_list_sort(&list);
		CHECK(list.count == 2 && list.extents[0].objectid == 257 &&
		      list.extents[1].objectid == 258);
		extent_list_deinit(&list);
	}
}

static int emit_overlap(struct image *image, struct tree_builder *tree, void *context)
{
	struct extent extent = { GIB(1), 8192, TREE_FS, 257, 0, 1, 0, true };
	int ret = image_add_data(image, &extent);

	(void)tree;
	(void)context;
	extent.start += 4096;
	return ret ? ret : image_add_data(image, &extent);
}

static int emit_many_refs(struct image *image, struct tree_builder *tree, void *context)
{
	int ret = 0;

	(void)tree;
	(void)context;
	for (uint64_t i = 0; i < 1000 && !ret; i++) {
		struct extent extent = { GIB(1), 4096, TREE_FS, 257 + i, 0, 1, 0, true };

		ret = image_add_data(image, &extent);
	}
	return ret;
}

static int emit_stray(struct image *image, struct tree_builder *tree, void *context)
{
	struct extent extent = { GIB(2), 4096, TREE_FS, 257, 0, 1, 0, true };

	(void)tree;
	(void)context;
	return image_add_data(image, &extent);
}

/* Builds an image with this METADATA chunk and this tree, without writing it. */
static int try_image(uint64_t metadata_bytes, image_emit *emit)
{
	struct image_params params = {
		.fd = -1,
		.node_bytes = DEFAULT_NODE_BYTES,
		.device_bytes = GIB(2),
		.generation = 1,
		.label = "",
	};
	struct chunk chunks[] = {
		{ MIB(1), MIB(4), CHUNK_SYSTEM, 1, { MIB(1) } },
		{ MIB(8), metadata_bytes, CHUNK_METADATA, 1, { MIB(8) } },
		{ GIB(1), MIB(4), CHUNK_DATA, 1, { GIB(1) } },
	};
	struct image_tree tree = { .objectid = TREE_FS, .emit = emit };
	struct image image = { 0 };
	int ret = image_init(&image, &params);

	for (int i = 0; i < 3 && !ret; i++)
		ret = image_add_chunk(&image, &chunks[i]);
	if (!ret)
		ret = image_build_tree(&image, &tree);
	if (!ret)
		ret = image_commit(&image);
	if (!ret)
		/* References that have no room in the item need more blocks. */
		CHECK(image.system_blocks == 1 &&
		      (emit == emit_many_refs) == (image.metadata_blocks > 9));
	image_deinit(&image);
	return ret;
}

static void check_image(void)
{
	CHECK(try_image(MIB(8), NULL) == 0);
	/* Nine blocks, and one to spare. */
	CHECK(try_image(10 * DEFAULT_NODE_BYTES, NULL) == -EINVAL); /* not whole stripes */
	CHECK(try_image(12 * DEFAULT_NODE_BYTES, NULL) == 0);
	CHECK(try_image(8 * DEFAULT_NODE_BYTES, NULL) == -ENOSPC);
	CHECK(try_image(4 * DEFAULT_NODE_BYTES, NULL) == -ENOSPC);
	CHECK(try_image(MIB(8), emit_overlap) == -EINVAL);
	CHECK(try_image(MIB(8), emit_stray) == -EINVAL);
	CHECK(try_image(MIB(8), emit_many_refs) == 0);
}

static int plan(uint64_t virtual_bytes, uint64_t chunk_bytes, const char *name)
{
	struct seed seed = {
		.virtual_bytes = virtual_bytes,
		.chunk_bytes = chunk_bytes,
		.virtual_name = name,
		.label = "",
		/* The UUID tree needs different UUIDs of subvolumes. */
		.subvolume_uuid = { 1 },
	};

	return seed_plan(&seed);
}

static void check_seed(void)
{
	CHECK(plan(MIB(4), 0, "name") == 0);
	CHECK(plan(MIB(4), 0, SEED_SUBVOLUME_NAME) == -EEXIST);
	CHECK(plan(MIB(4) - 4096, 0, "name") == -ERANGE);
	CHECK(plan(MIB(4) + 1, 0, "name") == -EINVAL);
	CHECK(plan(SEED_VIRTUAL_MAX_BYTES, 0, "name") == 0);
	CHECK(plan(SEED_VIRTUAL_MAX_BYTES + 4096, 0, "name") == -ERANGE);
	CHECK(plan(GIB(8), GIB(4), "name") == 0);
	CHECK(plan(GIB(8), GIB(4) - 65536, "name") == -EINVAL);
	CHECK(plan(GIB(8), TIB(256), "name") == -ERANGE);
	CHECK(plan(TIB(1025), GIB(4), "name") == -ERANGE);
	CHECK(plan(MIB(4), 0, "a/b") == -EINVAL && plan(MIB(4), 0, "") == -EINVAL);
	CHECK(plan(MIB(4), 0, "..") == -EINVAL);
}

/* Checks outfile.h with (`named`) and without a temporary name. */
static void check_outfile(const char *directory, bool named)
{
	_cleanup_free_ char *path = NULL;
	struct outfile out;
	struct stat st;

	if (asprintf(&path, "%s/output", directory) < 0)
		return;
	CHECK(outfile_open(&out, path, named) == 0 && stat(path, &st) < 0);
	outfile_close(&out);
	outfile_close(&out);
	CHECK(stat(path, &st) < 0);
	CHECK(outfile_open(&out, path, named) == 0 && write_full(out.fd, "1", 1) == 0);
	CHECK(outfile_publish(&out, false) == 0);
	outfile_close(&out);
	CHECK(outfile_open(&out, path, named) == 0 && write_full(out.fd, "22", 2) == 0);
	CHECK(outfile_publish(&out, false) == -EEXIST && stat(path, &st) == 0 && st.st_size == 1);
	CHECK(outfile_publish(&out, true) == 0 && stat(path, &st) == 0 && st.st_size == 2);
	outfile_close(&out);
	CHECK(unlink(path) == 0);
	CHECK(rmdir(directory) == 0 && mkdir(directory, 0700) == 0); /* nothing else was left */
}

int main(int argc, char **argv)
{
	message_init("format-units");
	if (argc != 2) {
		msg_error("an empty directory is needed");
		return EXIT_USAGE;
	}
	check_crc32c();
	check_keys();
	check_tree(0, 0);
	check_tree(1, 0);
	check_tree(1000, 1);
	check_tree(60000, 2);
	check_tree_refusals();
	check_alloc();
	check_chunks();
	check_super();
	check_extent_order();
	check_image();
	check_seed();
	check_outfile(argv[1], false);
	check_outfile(argv[1], true);
	return failures ? EXIT_FAILED : EXIT_OK;
}
