/* SPDX-License-Identifier: MIT */
#include "content/codec_index.h"

#include <endian.h>
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

static int check_header(const struct codec_index_header *header, uint64_t bytes,
			struct error *error)
{
	uint64_t size = le64toh(header->size), points = le64toh(header->points);
	uint64_t coded = le64toh(header->coded_bytes), end = le64toh(header->coded_end);
	uint64_t windows = le64toh(header->windows_bytes);

	if (bytes < sizeof(*header) || memcmp(header->magic, CODEC_INDEX_MAGIC, 8) != 0)
		return error_set(error, -EINVAL,
				 "it is no index: it does not begin with the magic number");
	if (le32toh(header->version) != CODEC_INDEX_VERSION || header->zero)
		return error_set(error, -EINVAL,
				 "it is an index of version %u; this server knows version %d",
				 le32toh(header->version), CODEC_INDEX_VERSION);
	if (!header->codec[0] || header->codec[CODEC_NAME_BYTES - 1])
		return error_set(error, -EINVAL, "the index names no codec");
	if (!size || size > INT64_MAX / 2 || !end || end > coded || coded > INT64_MAX / 16)
		return error_set(error, -EINVAL,
				 "the index says that %" PRIu64 " bytes come of %" PRIu64, size,
				 coded);
	if (!points || points > CODEC_POINTS_MAX || windows > CODEC_INDEX_BYTES_MAX)
		return error_set(error, -EINVAL,
				 "the index has %" PRIu64 " points with %" PRIu64
				 " bytes of windows; at most %d and %d are taken",
				 points, windows, CODEC_POINTS_MAX, CODEC_INDEX_BYTES_MAX);
	if (bytes != codec_index_head_bytes(points))
		return error_set(error, -EINVAL,
				 "the index is damaged: its %" PRIu64 " points take %" PRIu64
				 " bytes, not %" PRIu64,
				 points, codec_index_head_bytes(points), bytes);
	return 0;
}

static uint64_t span_end(const struct codec_index *index, uint64_t point)
{
	return point + 1 < index->count ? index->points[point + 1].offset : index->size;
}

static const char *fault_of(const struct codec_index *index, uint64_t number)
{
	const struct codec_point *point = &index->points[number];

	if (!number && point->offset)
		return "the first one is not at the beginning";
	if (number &&
	    (point->offset <= point[-1].offset || point->coded_bit <= point[-1].coded_bit))
		return "it is not behind the one before";
	if (point->offset >= index->size || point->coded_bit >= index->coded_end * 8)
		return "it is behind the end";
	if (span_end(index, number) - point->offset > CODEC_SPAN_MAX)
		return "the next one is too far away";
	if (point->window_bytes > CODEC_WINDOW_PACKED_MAX)
		return "its window is too large";
	if (point->window_bytes ? !number : point->coded_bit % 8)
		return "it has a window and needs none, or the other way round";
	return NULL;
}

static int check_points(const struct codec_index *index, struct error *error)
{
	uint64_t windows = 0;

	for (uint64_t i = 0; i < index->count; i++) {
		const char *fault;

		/* The order first: what is said of a span takes it for granted. */
		if (i + 1 < index->count && index->points[i + 1].offset <= index->points[i].offset)
			return error_set(error, -EINVAL,
					 "point %" PRIu64
					 " of the index is wrong: it is not behind the one before",
					 i + 1);
		fault = fault_of(index, i);
		if (fault)
			return error_set(error, -EINVAL,
					 "point %" PRIu64 " of the index is wrong: %s", i, fault);
		windows += index->points[i].window_bytes;
	}
	return windows == index->windows_bytes ?
		       0 :
		       error_set(error, -EINVAL,
				 "the index is damaged: its windows have %" PRIu64
				 " bytes, not %" PRIu64,
				 windows, index->windows_bytes);
}

int codec_index_parse(const uint8_t *head, uint64_t bytes, struct codec_index **index,
		      struct error *error)
{
	struct codec_index_header header = {};
	struct codec_index *made;
	int err;

	memcpy(&header, head, bytes < sizeof(header) ? bytes : sizeof(header));
	err = check_header(&header, bytes, error);
	if (err)
		return err;
	made = calloc(1, sizeof(*made) + le64toh(header.points) * sizeof(*made->points));
	if (!made)
		return error_set(error, -ENOMEM, "no memory for an index");
	memcpy(made->codec, header.codec, CODEC_NAME_BYTES);
	made->size = le64toh(header.size);
	made->coded_bytes = le64toh(header.coded_bytes);
	made->coded_end = le64toh(header.coded_end);
	made->windows_bytes = le64toh(header.windows_bytes);
	made->count = le64toh(header.points);
	for (uint64_t i = 0; i < made->count; i++) {
		struct codec_index_point point;

		memcpy(&point, head + codec_index_head_bytes(i), sizeof(point));
		made->points[i] = (struct codec_point){
			.offset = le64toh(point.offset),
			.coded_bit = le64toh(point.coded_bit),
			.window_bytes = le32toh(point.window_bytes),
		};
	}
	err = check_points(made, error);
	if (err)
		free(made);
	else
		*index = made;
	return err;
}

int codec_index_check_units(const struct codec_index *index, uint32_t unit_bytes,
			    struct error *error)
{
	uint64_t at = 0;

	while (at < index->size) {
		uint64_t rest = index->size - at, span;
		uint32_t length = rest < unit_bytes ? (uint32_t)rest : unit_bytes;
		struct coded_range range;

		codec_index_plan(index, at, length, &range);
		if (range.length <= CODEC_CODED_MAX) {
			/* Units within one span need the same: few points, few steps. */
			span = span_end(index, range.point);
			at += unit_bytes;
			if (span > at + unit_bytes)
				at = span - span % unit_bytes;
			continue;
		}
		error_set_hint(error, "a smaller unit, or an index with more points");
		return error_set(error, -EINVAL,
				 "%u bytes at %" PRIu64 " need more than %d of the object", length,
				 at, CODEC_CODED_MAX);
	}
	return 0;
}

/* The number of points before or at `offset`. */
static uint64_t points_up_to(const struct codec_index *index, uint64_t offset)
{
	uint64_t low = 0, high = index->count;

	while (low < high) {
		uint64_t middle = low + (high - low) / 2;

		if (index->points[middle].offset <= offset)
			low = middle + 1;
		else
			high = middle;
	}
	return low;
}

void codec_index_plan(const struct codec_index *index, uint64_t offset, uint32_t length,
		      struct coded_range *range)
{
	uint64_t first = points_up_to(index, offset) - 1, last_byte = offset + length - 1;
	uint64_t behind = points_up_to(index, last_byte);
	const struct codec_point *point = &index->points[first];
	uint64_t end = behind < index->count ? (index->points[behind].coded_bit + 7) / 8 :
					       index->coded_end;
	uint64_t coded = end - point->coded_bit / 8;

	*range = (struct coded_range){
		.offset = point->coded_bit / 8,
		/* What is larger is refused when the index is added. */
		.length = coded < UINT32_MAX ? (uint32_t)coded : UINT32_MAX,
		.skip = (uint32_t)(offset - point->offset),
		.point = first,
		.behind = behind,
		.bit = point->coded_bit % 8,
		.ends_there = span_end(index, behind - 1) == last_byte + 1,
	};
}

uint32_t codec_index_first_bytes(const struct codec_index *index, const struct coded_range *range)
{
	uint64_t next = range->point + 1;

	if (next == range->behind)
		return range->length;
	return (uint32_t)((index->points[next].coded_bit + 7) / 8 - range->offset);
}

uint32_t codec_index_last_bytes(const struct codec_index *index, const struct coded_range *range)
{
	uint64_t start = index->points[range->behind - 1].coded_bit / 8;

	return (uint32_t)(range->offset + range->length - start);
}
