/* SPDX-License-Identifier: MIT */
/*
 * fuzz-tar [--seed N] [--iterations N] TAR...: changes tars, mostly with correct checksums of their
 * headers, and has the source read the result as a layer above the clean one. It may refuse it, but
 * must not crash, leak, hang or allocate without bound.
 */
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "base/cleanup.h"
#include "base/fileio.h"
#include "base/message.h"
#include "image/source.h"
#include "tests/fuzz.h"

enum {
	BLOCK_BYTES = 512,
	CHECKSUM_OFFSET = 148,
	CHECKSUM_BYTES = 8,
	CHANGE_BYTES = 6,
	TAR_BYTES_MAX = 1 << 20,
	STREAM_BYTES_MAX = 64 << 20,
	INODES_MAX = 100000,
};

static uint8_t *clean, *changed;
static size_t tar_bytes;
static int clean_fd, changed_fd;

static int none_begin(struct content_sink *sink, uint32_t inode, uint64_t bytes,
		      struct error *error)
{
	(void)sink, (void)inode, (void)error;
	return bytes ? 0 : -1;
}

static int none_data(struct content_sink *sink, const void *bytes, size_t length,
		     struct error *error)
{
	const uint8_t *first = bytes;

	(void)sink, (void)error;
	/* So that a sanitizer sees the ends of what is handed on. */
	return length && first[0] + first[length - 1] >= 0 ? 0 : -1;
}

static int none_hole(struct content_sink *sink, uint64_t length, struct error *error)
{
	(void)sink, (void)error;
	return length ? 0 : -1;
}

static int none_end(struct content_sink *sink, struct error *error)
{
	(void)sink, (void)error;
	return 0;
}

static const struct content_sink_ops none_ops = {
	.begin = none_begin,
	.data = none_data,
	.hole = none_hole,
	.end = none_end,
};

static int write_tar(int fd, const uint8_t *bytes, size_t length)
{
	return ftruncate(fd, (off_t)length) ? -1 : pwrite_full(fd, bytes, length, 0);
}

static void begin(const char *path)
{
	FILE *file = fopen(path, "rb");

	clean = malloc(TAR_BYTES_MAX);
	changed = malloc(TAR_BYTES_MAX);
	tar_bytes = file && clean && changed ? fread(clean, 1, TAR_BYTES_MAX, file) : 0;
	clean_fd = memfd_create("clean", MFD_CLOEXEC);
	changed_fd = memfd_create("changed", MFD_CLOEXEC);
	if (tar_bytes < BLOCK_BYTES || clean_fd < 0 || changed_fd < 0 ||
	    write_tar(clean_fd, clean, tar_bytes)) {
		msg_error("%s: it cannot be read", path);
		exit(EXIT_FAILED);
	}
	fclose(file);
}

static void end(void)
{
	close(clean_fd);
	close(changed_fd);
	free(clean);
	free(changed);
}

static void correct_checksum(uint8_t *header)
{
	unsigned sum = 0;
	char text[CHECKSUM_BYTES];

	memset(header + CHECKSUM_OFFSET, ' ', CHECKSUM_BYTES);
	for (int i = 0; i < BLOCK_BYTES; i++)
		sum += header[i];
	snprintf(text, sizeof(text), "%06o", sum);
	memcpy(header + CHECKSUM_OFFSET, text, 7);
}

/* Block (16 bits), place in it, what to do, and two values. Returns the tar's length. */
static size_t change(const uint8_t *how, size_t length)
{
	static const uint8_t values[] = {
		0, '0', '7', '9', '.', '/', '-', 0x80, 0xff, 'L', 'x', 'S'
	};
	size_t blocks = tar_bytes / BLOCK_BYTES, block = (how[0] | how[1] << 8) % blocks;
	uint8_t *header = changed + block * BLOCK_BYTES;
	size_t place = (how[2] | (how[3] & 0x80) << 1) % BLOCK_BYTES;
	bool is_header = !memcmp(header + 257, "ustar", 5);

	switch (how[3] & 7) {
	case 0:
		header[place] = how[4];
		break;
	case 1:
		/* Times, sizes, types and magic. */
		header[124 + how[2] % 40] = values[how[4] % sizeof(values)];
		break;
	case 2:
		memset(header + place, values[how[4] % sizeof(values)],
		       how[5] % (BLOCK_BYTES - place));
		break;
	case 3:
		memcpy(header, clean + (how[4] | how[5] << 8) % blocks * BLOCK_BYTES, BLOCK_BYTES);
		break;
	case 4:
		header[156] = (uint8_t) "0123456gxLKSDMVN"[how[4] % 16];
		break;
	case 5:
		header[place] ^= (uint8_t)(1 << how[4] % 8);
		break;
	case 6:
		header[place] = values[how[4] % sizeof(values)];
		break;
	default:
		return how[4] % 8 ? length : block * BLOCK_BYTES + how[5];
	}
	if (is_header && how[3] & 0x78)
		correct_checksum(header);
	return length;
}

static int read_layer(struct model *model, int fd)
{
	struct content_sink sink = { .ops = &none_ops };
	struct source_report report;
	struct error error = { 0 };
	char path[40];
	const struct source_options options = {
		.path = path,
		.is_oci_layer = true,
		.stream_bytes_max = STREAM_BYTES_MAX,
	};
	int err;

	snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
	err = source_read_tar(model, &sink, &options, &report, &error);
	/* What is refused comes with a reason. */
	if (err && !*error.text)
		abort();
	return err;
}

static void run(const uint8_t *data, size_t length)
{
	const struct model_limits limits = { INODES_MAX, INODES_MAX };
	struct error error = { 0 };
	struct model model;
	size_t bytes = tar_bytes;

	memcpy(changed, clean, tar_bytes);
	for (size_t i = 0; i + CHANGE_BYTES <= length; i += CHANGE_BYTES)
		bytes = change(data + i, bytes);
	if (bytes > tar_bytes)
		bytes = tar_bytes;
	if (model_init(&model, &limits, &error) || write_tar(changed_fd, changed, bytes))
		abort();
	if (read_layer(&model, clean_fd) || model_begin_layer(&model, &error))
		abort();
	(void)read_layer(&model, changed_fd);
	model_deinit(&model);
}

static const struct fuzzer fuzzer = {
	.name = "fuzz-tar",
	.what = "TAR",
	.input_bytes = 10 * CHANGE_BYTES,
	.begin = begin,
	.run = run,
	.end = end,
};
FUZZ_PROGRAM(fuzzer)
