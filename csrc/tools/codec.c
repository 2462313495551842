/* SPDX-License-Identifier: MIT */
/*
 * btrfs-ublk-codec: does for `btrfs-ublk map index` and `map digest` what needs the codecs.
 *
 *   index CODEC SPACING FILE OUTPUT	makes an index of FILE, and prints {"size", "coded_size",
 *					"points", "index_size"}
 *   read INDEX UNIT FILE [SELECTION]	writes all that is read of FILE, a unit at a time, as a
 *					server decodes it
 */
#include <endian.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/cleanup.h"
#include "base/fileio.h"
#include "base/message.h"
#include "content/codec.h"
#include "content/selection.h"

enum { UNIT_BYTES_MAX = 1 << 20 };

/* A file that is mapped. It is the user's own, and must not be cut meanwhile. */
struct input {
	const uint8_t *data;
	uint64_t bytes;
};

static int open_input(const char *path, struct input *input)
{
	_cleanup_close_ int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
	struct stat status;
	void *mapped;

	if (fd < 0 || fstat(fd, &status))
		return msg_fail(EXIT_FAILED, "cannot open '%s': %s", path, strerror(errno));
	if (!S_ISREG(status.st_mode) || !status.st_size)
		return msg_fail(EXIT_FAILED, "'%s' is no regular file with content", path);
	mapped = mmap(NULL, (size_t)status.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
	if (mapped == MAP_FAILED)
		return msg_fail(EXIT_FAILED, "cannot map '%s': %s", path, strerror(errno));
	*input = (struct input){ mapped, (uint64_t)status.st_size };
	return EXIT_OK;
}

static bool parse_number(const char *text, uint64_t most, uint32_t *number)
{
	char *end;
	unsigned long long value;

	errno = 0;
	value = strtoull(text, &end, 10);
	*number = (uint32_t)value;
	return !errno && !*end && end != text && *text != '-' && value && value <= most;
}

static int fail(const char *path, const struct error *error)
{
	msg_error("'%s': %s", path, error->text);
	if (*error->hint)
		msg_hint("%s", error->hint);
	return EXIT_FAILED;
}

static int write_index(const char *path, const struct codec_ops *codec,
		       const struct codec_scan *scan)
{
	_cleanup_close_ int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
	struct codec_index_header header = {
		.magic = CODEC_INDEX_MAGIC,
		.version = htole32(CODEC_INDEX_VERSION),
		.size = htole64(scan->size),
		.coded_bytes = htole64(scan->coded_bytes),
		.coded_end = htole64(scan->coded_end),
		.points = htole64(scan->count),
		.windows_bytes = htole64(scan->windows_bytes),
	};
	int err;

	memcpy(header.codec, codec->name, strlen(codec->name));
	err = fd < 0 ? -errno : write_full(fd, &header, sizeof(header));
	if (!err)
		err = write_full(fd, scan->points, scan->count * sizeof(*scan->points));
	if (!err)
		err = write_full(fd, scan->windows, scan->windows_bytes);
	if (!err && fsync(fd))
		err = -errno;
	if (!err)
		return EXIT_OK;
	return msg_fail(EXIT_FAILED, "cannot write '%s': %s", path, strerror(-err));
}

static int make_index(char **words)
{
	const struct codec_ops *codec = codec_find(words[0]);
	struct codec_scan scan = {};
	struct error error = {};
	struct input input;
	char known[100];
	int status;

	if (!codec) {
		msg_error("unknown codec '%s'", words[0]);
		msg_hint("known codecs: %s", codec_names(known, sizeof(known)));
		return EXIT_USAGE;
	}
	if (!parse_number(words[1], CODEC_SPAN_MAX, &scan.spacing))
		return msg_fail(EXIT_USAGE, "points are 1 to %d bytes apart, not '%s'",
				CODEC_SPAN_MAX, words[1]);
	status = open_input(words[2], &input);
	if (status)
		return status;
	scan.coded = input.data;
	scan.coded_bytes = input.bytes;
	if (codec->index(&scan, &error))
		status = fail(words[2], &error);
	else if (!scan.size)
		status = (msg_error("'%s' has no content", words[2]), EXIT_FAILED);
	else
		status = write_index(words[3], codec, &scan);
	if (!status)
		printf("{\"size\": %" PRIu64 ", \"coded_size\": %" PRIu64 ", \"points\": %" PRIu64
		       ", \"index_size\": %" PRIu64 "}\n",
		       scan.size, scan.coded_bytes, scan.count,
		       codec_index_head_bytes(scan.count) + scan.windows_bytes);
	codec_scan_free(&scan);
	return status;
}

/* An index as it lies in a file. */
struct opened {
	struct codec_index *index;
	const struct codec_ops *codec;
	const uint8_t *windows;
	uint64_t point; /* whose window comes next */
	struct selection *selection;
	const uint8_t *pieces; /* of the unit that comes next */
	uint64_t pieces_bytes;
};

static int open_index(const char *path, const struct input *file, struct opened *opened)
{
	const struct codec_index_header *header = (const struct codec_index_header *)file->data;
	struct error error = {};
	uint64_t windows = file->bytes < sizeof(*header) ? 0 : le64toh(header->windows_bytes);
	uint64_t head = windows < file->bytes ? file->bytes - windows : file->bytes;

	if (codec_index_parse(file->data, head, &opened->index, &error))
		return fail(path, &error);
	opened->windows = file->data + head;
	opened->codec = codec_find(opened->index->codec);
	if (opened->codec)
		return EXIT_OK;
	return msg_fail(EXIT_FAILED, "'%s' is for the unknown codec %s", path,
			opened->index->codec);
}

static int open_selection(const char *path, const struct input *file, struct opened *opened)
{
	const struct selection_header *header = (const struct selection_header *)file->data;
	uint64_t units = file->bytes < sizeof(*header) ? 0 : le64toh(header->units);
	uint64_t head = units <= SELECTION_UNITS_MAX ? selection_head_bytes(units) : 0;
	struct error error = {};

	if (head > file->bytes)
		head = file->bytes;
	if (selection_parse(file->data, head, &opened->selection, &error) ||
	    selection_check(opened->selection, opened->index, &error))
		return fail(path, &error);
	opened->pieces = file->data + head;
	opened->pieces_bytes = file->bytes - head;
	return EXIT_OK;
}

/* The next unit: there are as many parts as it has pieces. */
static int select_parts(struct opened *opened, uint64_t unit, uint8_t *data,
			struct codec_part **parts)
{
	uint32_t count = opened->selection->units[unit].pieces;
	size_t bytes = count * sizeof(struct selection_piece);
	int err;

	*parts = calloc(count, sizeof(**parts));
	if (!*parts || bytes > opened->pieces_bytes)
		return *parts ? -EUCLEAN : -ENOMEM;
	memset(data, 0, opened->selection->unit_bytes);
	err = selection_parts(opened->selection, unit, opened->pieces, bytes, 0, data, *parts);
	opened->pieces += bytes;
	opened->pieces_bytes -= bytes;
	return err;
}

static int read_unit(struct opened *opened, const struct input *object, uint64_t offset,
		     uint32_t length, uint8_t *data)
{
	const struct selection *selection = opened->selection;
	const struct codec_index *index = opened->index;
	struct codec_part all = { .length = length, .data = data };
	_cleanup_free_ struct codec_part *selected = NULL;
	uint8_t window[CODEC_WINDOW_BYTES];
	struct coded_range range;
	uint32_t window_bytes = 0;
	int err = 0;

	selection_plan(selection, index, offset, length, &range);
	if (range.length > object->bytes - range.offset)
		return -EBADMSG;
	while (opened->point < range.point)
		opened->windows += index->points[opened->point++].window_bytes;
	if (index->points[range.point].window_bytes)
		err = codec_window_unpack(opened->windows, index->points[range.point].window_bytes,
					  window, &window_bytes);
	if (!err && selection)
		err = select_parts(opened, offset / length, data, &selected);
	return err ? err :
		     codec_decode(opened->codec, &range, window, window_bytes,
				  object->data + range.offset, selected ?: &all,
				  selected ? selection->units[offset / length].pieces : 1);
}

static int read_units(struct opened *opened, const struct input *object, const char *path,
		      uint32_t unit_bytes)
{
	const struct selection *selection = opened->selection;
	uint64_t size = selection ? selection->count * unit_bytes : opened->index->size;
	_cleanup_free_ uint8_t *data = malloc(unit_bytes);

	if (!data)
		return msg_fail(EXIT_FAILED, "no memory");
	for (uint64_t at = 0; at < size; at += unit_bytes) {
		uint64_t rest = size - at;
		uint32_t length = rest < unit_bytes ? (uint32_t)rest : unit_bytes;
		int err = read_unit(opened, object, at, length, data);

		if (err)
			return msg_fail(EXIT_FAILED,
					"'%s': what is read at %" PRIu64
					" is not what the index says: %s",
					path, at, strerror(-err));
		err = write_full(STDOUT_FILENO, data, length);
		if (err)
			return msg_fail(EXIT_FAILED, "cannot write: %s", strerror(-err));
	}
	return EXIT_OK;
}

static int read_all(char **words, const char *selection)
{
	struct input file, object, selected;
	struct opened opened = {};
	uint32_t unit_bytes;
	int status;

	if (!parse_number(words[1], UNIT_BYTES_MAX, &unit_bytes))
		return msg_fail(EXIT_USAGE, "a unit has 1 to %d bytes, not '%s'", UNIT_BYTES_MAX,
				words[1]);
	status = open_input(words[0], &file);
	if (!status)
		status = open_input(words[2], &object);
	if (!status)
		status = open_index(words[0], &file, &opened);
	if (!status && opened.index->coded_bytes != object.bytes) {
		msg_error("'%s' is an index of %" PRIu64 " bytes, and '%s' has %" PRIu64, words[0],
			  opened.index->coded_bytes, words[2], object.bytes);
		status = EXIT_FAILED;
	}
	if (!status && selection)
		status = open_input(selection, &selected);
	if (!status && selection)
		status = open_selection(selection, &selected, &opened);
	if (!status && opened.selection && opened.selection->unit_bytes != unit_bytes) {
		msg_error("'%s' is for units of %u bytes", selection, opened.selection->unit_bytes);
		status = EXIT_FAILED;
	}
	if (!status)
		status = read_units(&opened, &object, words[2], unit_bytes);
	free(opened.index);
	free(opened.selection);
	return status;
}

int main(int argc, char **argv)
{
	message_init("btrfs-ublk-codec");
	if (argc == 2 && !strcmp(argv[1], "--version"))
		return print_version();
	if (argc == 6 && !strcmp(argv[1], "index"))
		return make_index(argv + 2);
	if ((argc == 5 || argc == 6) && !strcmp(argv[1], "read"))
		return read_all(argv + 2, argv[5]);
	return msg_fail(
		EXIT_USAGE,
		"usage: btrfs-ublk-codec index CODEC SPACING FILE OUTPUT | read INDEX UNIT FILE "
		"[SELECTION]");
}
