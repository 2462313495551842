/* SPDX-License-Identifier: MIT */
#include "tools/mkimage-selection.h"

#include <endian.h>
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/cleanup.h"
#include "base/fileio.h"
#include "content/selection.h"

enum { PARTS = 4096 };

struct writing {
	int fd;
	const struct layer *layer;
	uint32_t unit_bytes;
	struct selection_unit *units; /* numbers of this machine, until they are written */
	uint64_t pieces;
	uint64_t end; /* of the piece before, in the tar */
	struct selection_piece buffer[PARTS];
	size_t buffered;
};

static int flush(struct writing *writing)
{
	int ret = write_full(writing->fd, writing->buffer,
			     writing->buffered * sizeof(*writing->buffer));

	writing->buffered = 0;
	return ret;
}

/* Takes bytes that lie within one unit. */
static int take_piece(struct writing *writing, uint64_t place, uint64_t offset, uint32_t bytes)
{
	uint64_t number = place / writing->unit_bytes;
	struct selection_unit *unit = &writing->units[number];

	if (!unit->pieces++) {
		unit->offset = offset;
		writing->end = offset;
	}
	if (offset < writing->end || offset + bytes - unit->offset > SELECTION_SPAN_MAX ||
	    unit->pieces > SELECTION_PIECES_MAX)
		return -ERANGE;
	writing->buffer[writing->buffered++] = (struct selection_piece){
		.place = htole32((uint32_t)(place % writing->unit_bytes)),
		.skip = htole32((uint32_t)(offset - writing->end)),
		.length = htole32(bytes),
	};
	writing->end = offset + bytes;
	unit->length = (uint32_t)(writing->end - unit->offset);
	writing->pieces++;
	return writing->buffered == PARTS ? flush(writing) : 0;
}

static int take_origin(struct writing *writing, const struct data_origin *origin)
{
	uint64_t place = origin->object_offset - writing->layer->data_offset;
	uint64_t offset = origin->offset, bytes = origin->bytes;
	int ret = 0;

	while (bytes && !ret) {
		uint64_t part = writing->unit_bytes - place % writing->unit_bytes;

		if (part > bytes)
			part = bytes;
		ret = take_piece(writing, place, offset, (uint32_t)part);
		place += part;
		offset += part;
		bytes -= part;
	}
	return ret;
}

static int take_origins(struct writing *writing, struct data *data)
{
	const struct layer *layer = writing->layer;
	_cleanup_free_ struct data_origin *origins = calloc(PARTS, sizeof(*origins));
	int ret = origins ? 0 : -ENOMEM;

	for (uint64_t done = 0; done < layer->origins && !ret;) {
		size_t count = layer->origins - done < PARTS ? layer->origins - done : PARTS;

		ret = data_read_origins(data, layer->first_origin + done, origins, count);
		for (size_t i = 0; i < count && !ret; i++)
			ret = take_origin(writing, &origins[i]);
		done += count;
	}
	return ret ?: flush(writing);
}

static int write_head(struct writing *writing, uint64_t units)
{
	const struct selection_header header = {
		.magic = SELECTION_MAGIC,
		.version = htole32(SELECTION_VERSION),
		.unit_bytes = htole32(writing->unit_bytes),
		.units = htole64(units),
		.decoded_bytes = htole64(writing->layer->report.stream_bytes),
		.pieces = htole64(writing->pieces),
	};
	int ret = pwrite_full(writing->fd, &header, sizeof(header), 0);

	for (uint64_t i = 0; i < units; i++) {
		struct selection_unit *unit = &writing->units[i];

		unit->offset = htole64(unit->offset);
		unit->length = htole32(unit->length);
		unit->pieces = htole32(unit->pieces);
	}
	return ret ? ret :
		     pwrite_full(writing->fd, writing->units, units * sizeof(*writing->units),
				 sizeof(header));
}

int selection_write(int fd, const struct layer *layer, uint32_t unit_bytes, struct data *data,
		    struct error *error)
{
	uint64_t units = layer->data_bytes / unit_bytes;
	_cleanup_free_ struct writing *writing = calloc(1, sizeof(*writing));
	_cleanup_free_ struct selection_unit *heads = calloc(units, sizeof(*heads));
	int ret = writing && heads ? 0 : -ENOMEM;

	if (units > SELECTION_UNITS_MAX)
		return error_set(error, -EFBIG,
				 "%s: its content has %" PRIu64 " units; at most %d can stay in a "
				 "layer",
				 layer->options.path, units, SELECTION_UNITS_MAX);
	if (!ret) {
		*writing = (struct writing){
			.fd = fd,
			.layer = layer,
			.unit_bytes = unit_bytes,
			.units = heads,
		};
		/* The head comes when it is known. */
		if (lseek(fd, (off_t)selection_head_bytes(units), SEEK_SET) < 0)
			ret = -errno;
	}
	if (!ret)
		ret = take_origins(writing, data);
	if (!ret)
		ret = write_head(writing, units);
	if (ret == -ERANGE)
		return error_set(error, ret,
				 "%s: its files have too many holes to stay in the layer",
				 layer->options.path);
	return ret ? error_set(error, ret, "%s: cannot write where its content lies: %s",
			       layer->options.path, strerror(-ret)) :
		     0;
}
