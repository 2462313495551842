/* SPDX-License-Identifier: MIT */
/*
 * fuzz-physmap: what a kernel could say of chunks and file extents. The input is the answers of
 * tree searches, of chunks first: each is the number of its items and its bytes, both cut to what there is.
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

enum { ANSWER_BYTES_MAX = 4096 };

static struct fuzz_input input;

int __wrap_ioctl(int fd, unsigned long request, ...);

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
	/* An extent may be in any number of pieces: the list ends where it cannot be written. */
	int full = open("/dev/full", O_WRONLY | O_CLOEXEC);

	input = (struct fuzz_input){ data, length };
	mapper.format = map_format_find(formats[fuzz_take(&input, 1) % 3]);
	mapper.output = calloc(1, sizeof(*mapper.output));
	if (!mapper.output || full < 0)
		abort();
	mapper.output->fd = full;
	if (!chunk_map_init(&mapper.chunks, mapper.fd))
		emit_extents(&mapper, &file);
	map_output_flush(mapper.output);
	mapper_deinit(&mapper);
	close(full);
}

static void begin(const char *path)
{
	(void)path;
}

static void end(void)
{
}

static const struct fuzzer fuzzer = {
	.name = "fuzz-physmap",
	.input_bytes = ANSWER_BYTES_MAX,
	.begin = begin,
	.run = run,
	.end = end,
};
FUZZ_PROGRAM(fuzzer)
