/* SPDX-License-Identifier: MIT */
/*
 * fuzz-reader [--seed N] [--iterations N] IMAGE...: changes superblocks and tree blocks of healthy
 * images (images.h), and has the reader look at the result, all in this process.
 * They may fail, but must not crash, hang or allocate without bound.
 */
#include "btrfs/layout.h"
#include "btrfs/reader.h"
#include "tests/images.h"

static void look(int fd)
{
	struct layout layout;
	struct reader reader;

	if (reader_open(&reader, fd))
		return;
	(void)layout_find(&reader, &layout);
	reader_close(&reader);
}

static void run(const uint8_t *data, size_t length)
{
	fuzz_image_change(data, length, look);
}

static const struct fuzzer fuzzer = {
	.name = "fuzz-reader",
	.what = "IMAGE",
	.input_bytes = FUZZ_IMAGE_INPUT_BYTES,
	.begin = fuzz_image_load,
	.run = run,
	.end = fuzz_image_free,
};
FUZZ_PROGRAM(fuzzer)
