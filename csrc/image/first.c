/* SPDX-License-Identifier: MIT */
#include "image/first.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "image/place.h"

static int compare_ranges(const void *a, const void *b)
{
	const struct first_range *left = a, *right = b;
	int order = strcmp(left->path, right->path);

	return order ? order : (left->rank > right->rank) - (left->rank < right->rank);
}

int first_open(struct first *first, struct first_range *ranges, size_t count, const char *directory)
{
	*first = (struct first){
		.ranges = ranges,
		.count = count,
		.readings = calloc(count, sizeof(*first->readings)),
		.spool = SPOOL_CLOSED,
		.pieces.element_bytes = sizeof(struct first_piece),
		.path = malloc(PLACE_PATH_BYTES_MAX),
	};
	if (!first->readings || !first->path)
		return -ENOMEM;
	for (size_t i = 0; i < count; i++)
		ranges[i].rank = i;
	qsort(ranges, count, sizeof(*ranges), compare_ranges);
	return spool_open(&first->spool, directory);
}

void first_close(struct first *first)
{
	spool_close(&first->spool);
	pool_deinit(&first->pieces);
	free(first->readings);
	free(first->path);
}

/* Returns the number of the first range whose path is not below that one. */
static size_t lower_bound(const struct first *first, const char *path)
{
	size_t low = 0, high = first->count;

	while (low < high) {
		size_t middle = low + (high - low) / 2;

		if (strcmp(first->ranges[middle].path, path) < 0)
			low = middle + 1;
		else
			high = middle;
	}
	return low;
}

bool first_begin(struct first *first, const struct model *model, uint32_t inode)
{
	size_t end;

	model_path(model, model_inode(model, inode)->name, first->path, PLACE_PATH_BYTES_MAX);
	end = first->wanted = lower_bound(first, first->path);
	while (end < first->count && !strcmp(first->ranges[end].path, first->path))
		end++;
	first->wanted_count = end - first->wanted;
	if (!first->wanted_count)
		return false;
	first->readings[first->wanted] = ++first->reading;
	return true;
}

int first_take(struct first *first, uint64_t file_offset, const void *bytes, uint32_t length)
{
	struct first_piece *piece;

	for (size_t i = first->wanted; i < first->wanted + first->wanted_count; i++) {
		const struct first_range *range = &first->ranges[i];

		if (range->offset >= file_offset + length ||
		    (range->offset < file_offset && range->length <= file_offset - range->offset))
			continue;
		piece = pool_add(&first->pieces);
		if (!piece)
			return -ENOMEM;
		*piece = (struct first_piece){
			.file_offset = file_offset,
			.place = first->spool.bytes,
			.path = first->wanted,
			.rank = range->rank,
			.bytes = length,
			.reading = first->reading,
		};
		return spool_append(&first->spool, bytes, length);
	}
	return 0;
}

static int compare_pieces(const void *a, const void *b)
{
	const struct first_piece *left = a, *right = b;

	if (left->rank != right->rank)
		return left->rank < right->rank ? -1 : 1;
	return (left->file_offset > right->file_offset) - (left->file_offset < right->file_offset);
}

struct first_piece *first_sorted(const struct first *first, size_t *count)
{
	struct first_piece *pieces = calloc(first->pieces.count + 1, sizeof(*pieces));

	*count = 0;
	if (!pieces)
		return NULL;
	for (uint32_t i = 0; i < first->pieces.count; i++) {
		const struct first_piece *piece = pool_at(&first->pieces, i);

		if (piece->reading == first->readings[piece->path])
			pieces[(*count)++] = *piece;
	}
	qsort(pieces, *count, sizeof(*pieces), compare_pieces);
	return pieces;
}

int first_read(struct first *first, const struct first_piece *piece, void *bytes)
{
	return spool_read(&first->spool, piece->place, bytes, piece->bytes);
}
