/* SPDX-License-Identifier: MIT */
/*
 * fuzz-image IMAGE...: changes superblocks and tree blocks of healthy images (images.h), and has a
 * subvolume read as btrfs-ublk-readimage does: as a tar, as a list, and as a list of extents. It may
 * be refused with a reason, but must not crash, leak, hang or allocate without bound.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

#include "btrfs/reader.h"
#include "image/tar_write.h"
#include "image/tree.h"
#include "image/tree_extents.h"
#include "image/tree_list.h"
#include "tests/images.h"

/* Files may say that they have EiB of holes: the output is full then. */
enum { SUBVOLUME = 256, OUTPUT_BYTES_MAX = 1 << 20 };

static uint64_t form;
static size_t written;

static ssize_t take(void *owner, const char *data, size_t bytes)
{
	(void)owner, (void)data;
	written += bytes;
	if (written <= OUTPUT_BYTES_MAX)
		return (ssize_t)bytes;
	errno = ENOSPC;
	return 0;
}

static int read_tar(struct reader *reader, FILE *out, struct error *error)
{
	struct tar_writer writer;
	int ret;

	tar_writer_init(&writer, out, error);
	ret = tree_read(reader, SUBVOLUME, &writer.visitor, error);
	if (!ret)
		ret = tar_writer_finish(&writer);
	tar_writer_deinit(&writer);
	return ret;
}

static int read_list(struct reader *reader, FILE *out, struct error *error)
{
	struct tree_lister lister;
	int ret = tree_lister_init(&lister, out, error);

	if (!ret)
		ret = tree_read(reader, SUBVOLUME, &lister.visitor, error);
	if (!ret)
		ret = tree_lister_finish(&lister);
	tree_lister_deinit(&lister);
	return ret;
}

static int read_extents(struct reader *reader, FILE *out, struct error *error)
{
	struct extent_lister lister;
	int ret;

	extent_lister_init(&lister, out, error);
	ret = tree_read(reader, SUBVOLUME, &lister.visitor, error);
	return ret ? ret : extent_lister_finish(&lister);
}

static int (*const forms[])(struct reader *, FILE *, struct error *) = { read_tar, read_list,
									 read_extents };

static void look(int fd)
{
	struct error error = {};
	struct reader reader;
	FILE *out;
	int ret = reader_open(&reader, fd);

	if (ret) {
		fuzz_require(*reader.error, "refused without a reason");
		return;
	}
	written = 0;
	out = fopencookie(NULL, "w", (cookie_io_functions_t){ .write = take });
	if (!out)
		abort();
	ret = forms[form](&reader, out, &error);
	fuzz_require(!ret || *error.text, "refused without a reason");
	fclose(out);
	reader_close(&reader);
}

static void run(const uint8_t *data, size_t length)
{
	struct fuzz_input input = { data, length };

	form = fuzz_take(&input, 1) % (sizeof(forms) / sizeof(*forms));
	fuzz_image_change(input.data, input.length, look);
}

static const struct fuzzer fuzzer = {
	.name = "fuzz-image",
	.what = "IMAGE",
	.input_bytes = 1 + FUZZ_IMAGE_INPUT_BYTES,
	.begin = fuzz_image_load,
	.run = run,
	.end = fuzz_image_free,
};
FUZZ_PROGRAM(fuzzer)
