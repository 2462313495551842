/* SPDX-License-Identifier: MIT */
#include "physmap/rows.h"

#include "base/fileio.h"

#include <assert.h>
#include <endian.h>
#include <stdio.h>
#include <string.h>

/* No row of any format is longer. */
enum { ROW_BYTES_MAX = 1024 };

int map_output_flush(struct map_output *output)
{
	if (!output->error)
		output->error = write_full(output->fd, output->data, output->used);
	output->used = 0;
	return output->error;
}

/* Returns space for one row. The caller writes there, and then calls advance(). */
static char *row_space(struct map_output *output)
{
	if (output->used + ROW_BYTES_MAX > sizeof(output->data))
		map_output_flush(output);
	return output->data + output->used;
}

static void advance(struct map_output *output, const char *end)
{
	output->used = (size_t)(end - output->data);
	assert(output->used <= sizeof(output->data));
}

static char *put_text(char *to, const char *text)
{
	return stpcpy(to, text);
}

/* Does without printf, which would take most of the time for a map with millions of numbers. */
static char *put_number(char *to, uint64_t value)
{
	char digits[20];
	size_t count = 0;

	do {
		digits[sizeof(digits) - ++count] = (char)('0' + value % 10);
		value /= 10;
	} while (value);
	memcpy(to, digits + sizeof(digits) - count, count);
	return to + count;
}

static char *put_encoding(char *to, const char *name, unsigned value)
{
	to = put_text(to, name);
	return put_number(to, value);
}

/*
 * Writes "regular", "prealloc,compression=zstd" or "type=9,encryption=1": values without a name are
 * numbers. Compression: Documentation/filesystems/btrfs on-disk format, BTRFS_COMPRESS_*.
 */
static char *put_type(char *to, const struct map_row *row)
{
	static const char *const compressions[] = { NULL, "zlib", "lzo", "zstd" };

	switch (row->kind) {
	case MAP_INLINE:
		to = put_text(to, "inline");
		break;
	case MAP_REGULAR:
		to = put_text(to, "regular");
		break;
	case MAP_PREALLOC:
		to = put_text(to, "prealloc");
		break;
	case MAP_HOLE:
		to = put_text(to, "hole");
		break;
	default:
		to = put_encoding(to, "type=", row->kind);
	}
	if (row->compression && row->compression < sizeof(compressions) / sizeof(*compressions)) {
		to = put_text(to, ",compression=");
		to = put_text(to, compressions[row->compression]);
	} else if (row->compression) {
		to = put_encoding(to, ",compression=", row->compression);
	}
	if (row->encryption)
		to = put_encoding(to, ",encryption=", row->encryption);
	if (row->other_encoding)
		to = put_encoding(to, ",other_encoding=", row->other_encoding);
	return to;
}

static void tsv_begin(struct map_output *output)
{
	advance(output,
		put_text(row_space(output), "FILE OFFSET\tFILE SIZE\tEXTENT OFFSET\tEXTENT TYPE\t"
					    "LOGICAL SIZE\tLOGICAL OFFSET\t"
					    "PHYSICAL SIZE\tDEVID\tPHYSICAL OFFSET\n"));
}

static void tsv_row(struct map_output *output, const struct map_row *row)
{
	const uint64_t mapped[] = { row->logical_size, row->logical_offset, row->physical_size,
				    row->devid, row->physical_offset };
	char *to = row_space(output);

	to = put_number(to, row->file_offset);
	*to++ = '\t';
	to = put_number(to, row->file_size);
	*to++ = '\t';
	to = put_number(to, row->extent_offset);
	*to++ = '\t';
	to = put_type(to, row);
	for (size_t i = 0; i < sizeof(mapped) / sizeof(*mapped); i++) {
		*to++ = '\t';
		if (row->is_mapped)
			to = put_number(to, mapped[i]);
	}
	*to++ = '\n';
	advance(output, to);
}

static char *put_key(char *to, const char *key, uint64_t value, bool is_known)
{
	to = put_text(to, ", \"");
	to = put_text(to, key);
	to = put_text(to, "\": ");
	return is_known ? put_number(to, value) : put_text(to, "null");
}

static void json_row(struct map_output *output, const struct map_row *row)
{
	char *to = row_space(output);

	to = put_text(to, "{\"file_offset\": ");
	to = put_number(to, row->file_offset);
	to = put_key(to, "file_size", row->file_size, true);
	to = put_key(to, "extent_offset", row->extent_offset, true);
	to = put_text(to, ", \"extent_type\": \"");
	to = put_type(to, row);
	to = put_text(to, "\"");
	to = put_key(to, "logical_size", row->logical_size, row->is_mapped);
	to = put_key(to, "logical_offset", row->logical_offset, row->is_mapped);
	to = put_key(to, "physical_size", row->physical_size, row->is_mapped);
	to = put_key(to, "devid", row->devid, row->is_mapped);
	to = put_key(to, "physical_offset", row->physical_offset, row->is_mapped);
	to = put_key(to, "piece_offset", row->piece_offset, row->is_mapped);
	to = put_key(to, "copy", row->copy, row->is_mapped);
	to = put_text(to, ", \"profile\": ");
	if (row->is_mapped) {
		*to++ = '"';
		to = put_text(to, row->profile);
		*to++ = '"';
	} else {
		to = put_text(to, "null");
	}
	to = put_text(to, "}\n");
	advance(output, to);
}

/* These eight bytes name the format and its version. Rows of struct binary_row follow. */
static const char binary_magic[8] = { 'b', 'u', 'p', 'h', 'y', 's', '1', '\n' };

/* The nine columns, little-endian; all ones where there is no value. */
struct binary_row {
	uint64_t file_offset;
	uint64_t file_size;
	uint64_t extent_offset;
	uint8_t kind;
	uint8_t compression;
	uint8_t encryption;
	uint8_t zero[3];
	uint16_t other_encoding;
	uint64_t mapped[5];
} __attribute__((packed));
static_assert(sizeof(struct binary_row) == 9 * 8, "nine columns of eight bytes");

static void binary_begin(struct map_output *output)
{
	char *to = row_space(output);

	memcpy(to, binary_magic, sizeof(binary_magic));
	advance(output, to + sizeof(binary_magic));
}

static void binary_row(struct map_output *output, const struct map_row *row)
{
	const uint64_t mapped[] = { row->logical_size, row->logical_offset, row->physical_size,
				    row->devid, row->physical_offset };
	char *to = row_space(output);
	struct binary_row raw = {
		.file_offset = htole64(row->file_offset),
		.file_size = htole64(row->file_size),
		.extent_offset = htole64(row->extent_offset),
		.kind = row->kind,
		.compression = row->compression,
		.encryption = row->encryption,
		.other_encoding = htole16(row->other_encoding),
	};

	for (size_t i = 0; i < sizeof(mapped) / sizeof(*mapped); i++)
		raw.mapped[i] = row->is_mapped ? htole64(mapped[i]) : UINT64_MAX;
	memcpy(to, &raw, sizeof(raw));
	advance(output, to + sizeof(raw));
}

static const struct map_format formats[] = {
	{ .name = "tsv", .begin = tsv_begin, .row = tsv_row },
	{ .name = "json", .row = json_row },
	{ .name = "binary", .begin = binary_begin, .row = binary_row },
};

const struct map_format *map_format_find(const char *name)
{
	for (size_t i = 0; i < sizeof(formats) / sizeof(*formats); i++) {
		if (!strcmp(formats[i].name, name))
			return &formats[i];
	}
	return NULL;
}
