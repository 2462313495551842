/* SPDX-License-Identifier: MIT */
#include "content/selection.h"

#include <endian.h>
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

static int check_header(const struct selection_header *header, uint64_t bytes, struct error *error)
{
	uint64_t units = le64toh(header->units), decoded = le64toh(header->decoded_bytes);
	uint32_t unit_bytes = le32toh(header->unit_bytes);

	if (bytes < sizeof(*header) || memcmp(header->magic, SELECTION_MAGIC, 8) != 0)
		return error_set(error, -EINVAL,
				 "it is no selection: it does not begin with the magic number");
	if (le32toh(header->version) != SELECTION_VERSION)
		return error_set(error, -EINVAL,
				 "it is a selection of version %u; this server knows version %d",
				 le32toh(header->version), SELECTION_VERSION);
	if (unit_bytes < SELECTION_UNIT_MIN_BYTES || unit_bytes > SELECTION_UNIT_MAX_BYTES ||
	    unit_bytes & (unit_bytes - 1) || !units || units > SELECTION_UNITS_MAX)
		return error_set(error, -EINVAL,
				 "the selection has %" PRIu64 " units of %u bytes; at most %d are "
				 "taken, of 4 KiB to 1 MiB",
				 units, unit_bytes, SELECTION_UNITS_MAX);
	if (!decoded || decoded > INT64_MAX / 2 || le64toh(header->pieces) > SELECTION_BYTES_MAX)
		return error_set(error, -EINVAL,
				 "the selection has %" PRIu64 " pieces of %" PRIu64 " bytes",
				 le64toh(header->pieces), decoded);
	if (bytes != selection_head_bytes(units))
		return error_set(error, -EINVAL,
				 "the selection is damaged: its %" PRIu64 " units take %" PRIu64
				 " bytes, not %" PRIu64,
				 units, selection_head_bytes(units), bytes);
	return 0;
}

static const char *fault_of(const struct selection *selection, uint64_t number)
{
	const struct selection_unit *unit = &selection->units[number];

	if (!unit->length || !unit->pieces)
		return "it has no bytes";
	if (unit->length > SELECTION_SPAN_MAX || unit->pieces > SELECTION_PIECES_MAX)
		return "it has too many bytes or pieces";
	if (unit->offset > selection->decoded_bytes ||
	    unit->length > selection->decoded_bytes - unit->offset)
		return "it is behind the end of the object";
	if (number && unit->offset < unit[-1].offset + unit[-1].length)
		return "it is not behind the one before";
	return NULL;
}

static int check_units(const struct selection *selection, struct error *error)
{
	uint64_t pieces = 0;

	for (uint64_t i = 0; i < selection->count; i++) {
		const char *fault = fault_of(selection, i);

		if (fault)
			return error_set(error, -EINVAL,
					 "unit %" PRIu64 " of the selection is wrong: %s", i,
					 fault);
		pieces += selection->units[i].pieces;
	}
	return pieces == selection->pieces ?
		       0 :
		       error_set(error, -EINVAL,
				 "the selection is damaged: its units have %" PRIu64
				 " pieces, not %" PRIu64,
				 pieces, selection->pieces);
}

int selection_parse(const uint8_t *head, uint64_t bytes, struct selection **selection,
		    struct error *error)
{
	struct selection_header header = {};
	struct selection *made;
	int err;

	memcpy(&header, head, bytes < sizeof(header) ? bytes : sizeof(header));
	err = check_header(&header, bytes, error);
	if (err)
		return err;
	made = calloc(1, sizeof(*made) + le64toh(header.units) * sizeof(*made->units));
	if (!made)
		return error_set(error, -ENOMEM, "no memory for a selection");
	made->unit_bytes = le32toh(header.unit_bytes);
	made->count = le64toh(header.units);
	made->decoded_bytes = le64toh(header.decoded_bytes);
	made->pieces = le64toh(header.pieces);
	for (uint64_t i = 0; i < made->count; i++) {
		struct selection_unit unit;

		memcpy(&unit, head + selection_head_bytes(i), sizeof(unit));
		made->units[i] = (struct selection_unit){
			.offset = le64toh(unit.offset),
			.length = le32toh(unit.length),
			.pieces = le32toh(unit.pieces),
		};
	}
	err = check_units(made, error);
	if (err)
		free(made);
	else
		*selection = made;
	return err;
}

int selection_check(const struct selection *selection, const struct codec_index *index,
		    struct error *error)
{
	if (selection->decoded_bytes != index->size)
		return error_set(error, -EINVAL,
				 "the selection is of an object of %" PRIu64
				 " bytes, and the index of one of %" PRIu64,
				 selection->decoded_bytes, index->size);
	for (uint64_t i = 0; i < selection->count; i++) {
		struct coded_range range;

		selection_plan(selection, index, i * selection->unit_bytes, selection->unit_bytes,
			       &range);
		if (range.length <= CODEC_CODED_MAX)
			continue;
		error_set_hint(error, "a smaller unit, or an index with more points");
		return error_set(error, -EINVAL,
				 "unit %" PRIu64 " needs more than %d bytes of the object", i,
				 CODEC_CODED_MAX);
	}
	return 0;
}

void selection_plan(const struct selection *selection, const struct codec_index *index,
		    uint64_t offset, uint32_t length, struct coded_range *range)
{
	const struct selection_unit *first, *last;
	uint64_t decoded;

	if (!selection) {
		codec_index_plan(index, offset, length, range);
		return;
	}
	first = &selection->units[offset / selection->unit_bytes];
	last = &selection->units[(offset + length - 1) / selection->unit_bytes];
	decoded = last->offset + last->length - first->offset;
	codec_index_plan(index, first->offset,
			 decoded < UINT32_MAX ? (uint32_t)decoded : UINT32_MAX, range);
	/* Units behind one another may lie far apart. */
	if (decoded > CODEC_SPAN_MAX)
		range->length = UINT32_MAX;
}

int selection_parts(const struct selection *selection, uint64_t unit, const void *pieces,
		    size_t bytes, uint32_t gap, uint8_t *data, struct codec_part *parts)
{
	const struct selection_unit *whole = &selection->units[unit];
	uint64_t place = 0, decoded = 0;

	if (bytes != whole->pieces * sizeof(struct selection_piece))
		return -EUCLEAN;
	for (uint32_t i = 0; i < whole->pieces; i++) {
		struct selection_piece piece;

		memcpy(&piece, (const uint8_t *)pieces + i * sizeof(piece), sizeof(piece));
		parts[i].skip = le32toh(piece.skip);
		parts[i].length = le32toh(piece.length);
		if (!parts[i].length || le32toh(piece.place) < place)
			return -EUCLEAN;
		place = (uint64_t)le32toh(piece.place) + parts[i].length;
		decoded += (uint64_t)parts[i].skip + parts[i].length;
		if (place > selection->unit_bytes || decoded > whole->length)
			return -EUCLEAN;
		parts[i].data = data + le32toh(piece.place);
	}
	parts->skip += gap;
	return decoded == whole->length ? 0 : -EUCLEAN;
}
