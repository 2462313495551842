/* SPDX-License-Identifier: MIT */
/*
 * fuzz-physmap: what a kernel could say of chunks and file extents. The input is the answers of
 * tree searches, of chunks first: each is the number of its items and its bytes, both cut to what
 * there is. Some items are made of few bytes, so that they are as a file system has them.
 * btrfs-ublk-map-physical may refuse them, but must end, and read no byte behind them.
 */
#include <linux/btrfs.h>
#include <stdarg.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "tests/fuzz.h"

int map_physical_main(int argc, char **argv);
#define main map_physical_main
#include "tools/map-physical.c" /* NOLINT(bugprone-suspicious-include): to call its main() */
#undef main

/* An extent may be in any number of pieces. The output fails after as many bytes of rows. */
enum { ANSWER_BYTES_MAX = 4096, ROWS_BYTES = 16384 };

static int full = -1;

static struct fuzz_input input;

int __wrap_ioctl(int fd, unsigned long request, ...);

/* A power of two, or a multiple of a block. */
static uint64_t take_size(void)
{
	uint64_t how = fuzz_take(&input, 1);

	return how & 0x80 ? 1ull << (how & 63) : how * BLOCK_BYTES;
}

static size_t make_chunk(uint8_t *to)
{
	static const uint64_t profiles[] = {
		0,
		BTRFS_BLOCK_GROUP_RAID0,
		BTRFS_BLOCK_GROUP_RAID1,
		BTRFS_BLOCK_GROUP_DUP,
		BTRFS_BLOCK_GROUP_RAID10,
		BTRFS_BLOCK_GROUP_RAID5,
		BTRFS_BLOCK_GROUP_RAID6,
		BTRFS_BLOCK_GROUP_RAID1C3,
	};
	uint64_t how = fuzz_take(&input, 1);
	struct btrfs_chunk chunk = {
		.length = htole64(take_size()),
		.stripe_len = htole64(take_size()),
		.type = htole64(BTRFS_BLOCK_GROUP_DATA | profiles[how % 8]),
		.num_stripes = htole16(how / 8 % 8),
		.sub_stripes = htole16(how / 64),
	};
	size_t head = offsetof(struct btrfs_chunk, stripe);

	memcpy(to, &chunk, head);
	for (size_t i = 0; i < how / 8 % 8; i++) {
		struct btrfs_stripe stripe = { .devid = htole64(i + 1),
					       .offset = htole64(take_size()) };

		memcpy(to + head + i * sizeof(stripe), &stripe, sizeof(stripe));
	}
	return head + how / 8 % 8 * sizeof(struct btrfs_stripe);
}

static size_t make_extent(uint8_t *to)
{
	uint64_t how = fuzz_take(&input, 1);
	struct btrfs_file_extent_item extent = {
		.type = how % 4,
		.compression = how / 4 % 8,
		.encryption = how / 32 % 2,
		.other_encoding = htole16(how / 64 % 2),
		.ram_bytes = htole64(take_size()),
		.disk_bytenr = htole64(take_size()),
		.disk_num_bytes = htole64(take_size()),
		.offset = htole64(take_size()),
		.num_bytes = htole64(take_size()),
	};

	memcpy(to, &extent, sizeof(extent));
	return sizeof(extent);
}

/* Items, each a header as the kernel has it, and its data. */
static void answer(struct btrfs_ioctl_search_args_v2 *args)
{
	uint8_t *to = (uint8_t *)args->buf;
	uint32_t items = (uint32_t)fuzz_take(&input, 1) % 16, done = 0;

	for (; done < items && input.length; done++) {
		struct btrfs_ioctl_search_header header = {
			.objectid = args->key.min_objectid,
			.type = args->key.min_type,
			.offset = fuzz_take(&input, 1) << (fuzz_take(&input, 1) % 64),
			.len = (uint32_t)fuzz_take(&input, 1),
		};

		if (header.offset < args->key.min_offset)
			header.offset = args->key.min_offset + header.offset % 65536;
		if (header.len == 255)
			header.len = (uint32_t)fuzz_take(&input, 4);
		if (header.len == 254) {
			header.len = (uint32_t)(header.type == BTRFS_CHUNK_ITEM_KEY ?
							make_chunk(to + sizeof(header)) :
							make_extent(to + sizeof(header)));
			memcpy(to, &header, sizeof(header));
			to += sizeof(header) + header.len;
			continue;
		}
		memcpy(to, &header, sizeof(header));
		to += sizeof(header);
		for (uint32_t i = 0; i < header.len && i < 256; i++)
			*to++ = (uint8_t)fuzz_take(&input, 1);
	}
	args->key.nr_items = done;
}

int __wrap_ioctl(int fd, unsigned long request, ...)
{
	va_list args;
	void *argument;

	(void)fd;
	va_start(args, request);
	argument = va_arg(args, void *);
	va_end(args);
	if (request == BTRFS_IOC_TREE_SEARCH_V2) {
		answer(argument);
	} else if (request == BTRFS_IOC_GET_FEATURES) {
		memset(argument, 0, sizeof(struct btrfs_ioctl_feature_flags));
	}
	return 0;
}

static void run(const uint8_t *data, size_t length)
{
	static const char *const formats[] = { "tsv", "json", "binary" };
	struct mapper mapper = { .path = "x", .fd = -1, .block_bytes = BLOCK_BYTES };
	struct stat file = { .st_ino = 257, .st_size = 1 << 20 };

	input = (struct fuzz_input){ data, length };
	mapper.format = map_format_find(formats[fuzz_take(&input, 1) % 3]);
	mapper.output = calloc(1, sizeof(*mapper.output));
	if (!mapper.output)
		abort();
	mapper.output->fd = full;
	mapper.output->used = sizeof(mapper.output->data) - ROWS_BYTES;
	if (!chunk_map_init(&mapper.chunks, mapper.fd))
		emit_extents(&mapper, &file);
	map_output_flush(mapper.output);
	mapper_deinit(&mapper);
}

static void begin(const char *path)
{
	(void)path;
	full = open("/dev/full", O_WRONLY | O_CLOEXEC);
	if (full < 0)
		abort();
}

static void end(void)
{
	close(full);
}

static const struct fuzzer fuzzer = {
	.name = "fuzz-physmap",
	.input_bytes = ANSWER_BYTES_MAX,
	.begin = begin,
	.run = run,
	.end = end,
};
FUZZ_PROGRAM(fuzzer)
