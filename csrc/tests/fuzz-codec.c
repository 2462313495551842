/* SPDX-License-Identifier: MIT */
/*
 * fuzz-codec [--seed N] [--iterations N] OBJECT...: changes a compressed object, its index
 * (OBJECT.index), or its selection (OBJECT.selection, if there is one, for units of 64 KiB), and
 * has it indexed or decoded. That may fail, but must not crash, hang, or give
 * more bytes than were asked for; and an object and an index that were not changed are decoded.
 *
 * The first byte of an input says what is changed; each further 5 are a place and its new value.
 */
#include <endian.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>

#include "base/cleanup.h"
#include "base/fileio.h"
#include "base/message.h"
#include "content/selection.h"
#include "tests/fuzz.h"

enum {
	INPUT_BYTES_MAX = 256,
	CHANGE_BYTES = 5,
	UNIT_BYTES = 64 << 10,
	UNITS_READ = 3,		   /* of each input, so that many inputs are tried */
	SPACING_MIN_BYTES = 32768, /* as making windows takes the most time */
	CHANGES_OBJECT = 1,
	CHANGES_INDEX = 2,
	MAKES_INDEX = 4,
	CUTS = 8,
	CHANGES_SELECTION = 16,
	OTHER_SUBJECT = 32, /* times the number of what libFuzzer began with */
};

struct content {
	uint8_t *clean, *changed;
	uint64_t bytes;
};

/* Windows are compressed, but not as well as the program does it, which takes ten times as long. */
int __wrap_compress2(Bytef *to, uLongf *bytes, const Bytef *from, uLong from_bytes, int level);
int __real_compress2(Bytef *to, uLongf *bytes, const Bytef *from, uLong from_bytes, int level);

int __wrap_compress2(Bytef *to, uLongf *bytes, const Bytef *from, uLong from_bytes, int level)
{
	(void)level;
	return __real_compress2(to, bytes, from, from_bytes, Z_BEST_SPEED);
}

enum { SUBJECTS_MAX = 4 };

static struct subject {
	struct content object, file, selected; /* selected: may have no bytes */
} subjects[SUBJECTS_MAX];
static unsigned subject_count;

/* The one that this input is about. */
static struct content object, file, selected;

static void die(const char *what, int err)
{
	msg_error("%s: %s", what, strerror(-err));
	exit(EXIT_FAILED);
}

static void load(struct content *content, const char *path)
{
	_cleanup_close_ int fd = open(path, O_RDONLY | O_CLOEXEC);
	struct stat status;
	int err;

	if (fd < 0 || fstat(fd, &status))
		die(path, -errno);
	content->bytes = (uint64_t)status.st_size;
	content->clean = malloc(content->bytes);
	content->changed = malloc(content->bytes);
	err = content->clean && content->changed ?
		      pread_full(fd, content->clean, content->bytes, 0) :
		      -ENOMEM;
	if (err)
		die(path, err);
	memcpy(content->changed, content->clean, content->bytes);
}

static void begin(const char *path)
{
	struct subject *subject = &subjects[subject_count++];
	char index[4096];

	if (subject_count > SUBJECTS_MAX)
		die(path, -E2BIG);
	snprintf(index, sizeof(index), "%s.index", path);
	load(&subject->object, path);
	load(&subject->file, index);
	snprintf(index, sizeof(index), "%s.selection", path);
	if (!access(index, F_OK))
		load(&subject->selected, index);
}

static void unload(struct content *content)
{
	free(content->clean);
	free(content->changed);
	*content = (struct content){};
}

static void end(void)
{
	while (subject_count) {
		struct subject *subject = &subjects[--subject_count];

		unload(&subject->object);
		unload(&subject->file);
		unload(&subject->selected);
	}
}

static uint32_t number_at(const uint8_t *data)
{
	uint32_t number;

	memcpy(&number, data, sizeof(number));
	return le32toh(number);
}

/* Sets bytes at places that the input names, half of them near the start, where headers are. */
static void change(struct content *content, const uint8_t *data, size_t length)
{
	for (; length >= CHANGE_BYTES; data += CHANGE_BYTES, length -= CHANGE_BYTES) {
		uint32_t place = number_at(data);
		uint64_t most = place % 2 && content->bytes > 256 ? 256 : content->bytes;

		content->changed[place / 2 % most] ^= data[4];
	}
}

static int select_parts(const struct selection *selection, uint64_t unit, uint8_t *data,
			struct codec_part **parts, uint32_t *count)
{
	uint64_t at = selection_head_bytes(selection->count);
	size_t bytes;
	uint8_t *pieces;
	int err;

	for (uint64_t i = 0; i < unit; i++)
		at += selection->units[i].pieces * sizeof(struct selection_piece);
	*count = selection->units[unit].pieces;
	bytes = *count * sizeof(struct selection_piece);
	if (at > selected.bytes || bytes > selected.bytes - at)
		return -EUCLEAN;
	*parts = malloc(*count * sizeof(**parts));
	pieces = malloc(bytes);
	memcpy(pieces, selected.changed + at, bytes);
	err = selection_parts(selection, unit, pieces, bytes, 0, data, *parts);
	free(pieces);
	return err;
}

static void decode(const struct codec_index *index, const struct selection *selection,
		   const struct codec_ops *codec, uint64_t windows_at, uint64_t offset,
		   bool must_work)
{
	uint64_t size = selection ? selection->count * UNIT_BYTES : index->size;
	uint64_t rest = size - offset, coded_end;
	uint32_t length = rest < UNIT_BYTES ? (uint32_t)rest : UNIT_BYTES;
	uint8_t window[CODEC_WINDOW_BYTES];
	struct coded_range range;
	uint32_t window_bytes = 0, count = 1;
	struct codec_part all = { .length = length }, *parts = &all;
	uint8_t *data;
	int err = 0;

	selection_plan(selection, index, offset, length, &range);
	if (range.length > CODEC_CODED_MAX)
		return;
	coded_end = range.offset + range.length;
	if (coded_end > object.bytes)
		return; /* a server would not get it */
	for (uint64_t i = 0; i < range.point; i++)
		windows_at += index->points[i].window_bytes;
	if (index->points[range.point].window_bytes)
		err = codec_window_unpack(file.changed + windows_at,
					  index->points[range.point].window_bytes, window,
					  &window_bytes);
	/* Of their own, so that a sanitizer sees each byte too much. */
	data = malloc(length);
	all.data = data;
	if (data && !err) {
		uint8_t *coded = malloc(range.length);

		memcpy(coded, object.changed + range.offset, range.length);
		if (selection)
			err = select_parts(selection, offset / UNIT_BYTES, data, &parts, &count);
		if (!err)
			err = codec_decode(codec, &range, window, window_bytes, coded, parts,
					   count);
		free(coded);
		if (parts != &all)
			free(parts);
	}
	free(data);
	if (must_work && err)
		die("what was not changed", err);
}

static bool open_selection(const struct codec_index *index, struct selection **selection)
{
	const struct selection_header *header = (const void *)selected.changed;
	uint64_t units = le64toh(header->units), head = selected.bytes;
	struct error error = {};

	if (units <= SELECTION_UNITS_MAX && selection_head_bytes(units) < head)
		head = selection_head_bytes(units);
	if (selection_parse(selected.changed, head, selection, &error))
		return false;
	if ((*selection)->unit_bytes == UNIT_BYTES && !selection_check(*selection, index, &error))
		return true;
	free(*selection);
	*selection = NULL;
	return false;
}

static void read_some(const uint8_t *data, bool must_work)
{
	const struct codec_index_header *header = (const void *)file.changed;
	uint64_t windows = le64toh(header->windows_bytes);
	uint64_t head = windows < file.bytes ? file.bytes - windows : file.bytes;
	struct codec_index *index = NULL;
	struct selection *selection = NULL;
	const struct codec_ops *codec;
	struct error error = {};

	if (codec_index_parse(file.changed, head, &index, &error)) {
		if (must_work)
			die(error.text, -EINVAL);
		return;
	}
	codec = codec_find(index->codec);
	if (selected.bytes && !open_selection(index, &selection) && must_work)
		die("a selection that was not changed", -EINVAL);
	for (unsigned i = 0; codec && i < UNITS_READ; i++) {
		uint64_t units = selection ? selection->count : (index->size - 1) / UNIT_BYTES + 1;

		decode(index, selection, codec, head,
		       (number_at(data) + i * 7919) % units * UNIT_BYTES, must_work);
	}
	free(selection);
	free(index);
}

static void make(const uint8_t *data)
{
	const struct codec_index_header *header = (const void *)file.clean;
	struct codec_scan scan = {
		.coded = object.changed,
		.coded_bytes = object.bytes,
		.spacing = SPACING_MIN_BYTES + (number_at(data) & 0x3ffff),
	};
	struct error error = {};

	if (data[0] & CUTS)
		scan.coded_bytes = number_at(data) % object.bytes + 1;
	if (codec_find(header->codec)->index(&scan, &error) && !*error.text)
		die("an error without a text", -EINVAL);
	codec_scan_free(&scan);
}

static void run_input(const uint8_t *data, size_t length)
{
	const struct subject *subject = &subjects[data[0] / OTHER_SUBJECT % subject_count];
	bool changes_object = data[0] & CHANGES_OBJECT, changes_index = data[0] & CHANGES_INDEX;
	bool changes_selection;

	object = subject->object;
	file = subject->file;
	selected = subject->selected;
	changes_selection = selected.bytes && data[0] & CHANGES_SELECTION;
	if (changes_object)
		change(&object, data + 1, length - 1);
	if (changes_index)
		change(&file, data + 1, length - 1);
	if (changes_selection)
		change(&selected, data + 1, length - 1);
	if (data[0] & MAKES_INDEX)
		make(data);
	else
		read_some(data, !changes_object && !changes_index && !changes_selection);
	memcpy(object.changed, object.clean, object.bytes);
	memcpy(file.changed, file.clean, file.bytes);
	if (selected.bytes)
		memcpy(selected.changed, selected.clean, selected.bytes);
}

static void run(const uint8_t *data, size_t length)
{
	/* Behind its end there are zeroes. */
	uint8_t padded[INPUT_BYTES_MAX + CHANGE_BYTES] = {};

	if (length)
		memcpy(padded, data, length);
	run_input(padded, length ?: 1);
}

static const struct fuzzer fuzzer = {
	.name = "fuzz-codec",
	.what = "OBJECT",
	.input_bytes = INPUT_BYTES_MAX,
	.begin = begin,
	.run = run,
	.end = end,
};
FUZZ_PROGRAM(fuzzer)
