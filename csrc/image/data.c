/* SPDX-License-Identifier: MIT */
#include "image/data.h"

#include <errno.h>
#include <openssl/evp.h>
#include <stdlib.h>
#include <string.h>

#include "base/array.h"
#include "base/cleanup.h"
#include "base/crypto.h"
#include "base/fileio.h"
#include "base/list.h"
#include "base/size.h"
#include "image/pieces.h"
#include "image/shares.h"
#include "image/spool.h"

struct data {
	struct content_sink sink;
	struct data_params params;
	struct data_counts counts;
	struct model *model;
	struct spool inlines, csums, digests, origins;
	struct shares shares;
	struct pieces *pieces;
	uint32_t piece_bytes;
	EVP_MD *sha256;
	EVP_MD_CTX *unit;    /* the digest of the unit that is being written */
	EVP_MD_CTX *content; /* the digest of all digests of pieces */
	uint64_t unit_bytes;
	uint64_t unit_number; /* the last unit that has content, */
	uint64_t unit_offset; /* and where that begins in the tar */
	struct data_gap *gaps;
	size_t gap_count;

	/* Content is collected, of files in that model. */
	struct first *first;
	const struct model *first_model;

	/* The file that is handed on. */
	uint32_t inode;
	uint64_t file_bytes, position;
	bool is_inline, has_content;
	bool is_passed_over; /* while content is collected */
	uint8_t inline_bytes[DATA_INLINE_BYTES_MAX];
	struct piece *piece; /* that is being filled; NULL: none */
};

enum {
	NO_INODE = 0, /* of a piece that no file has asked for yet */
	/* How much of a tar a unit may need. Small files, which are inline, may lie between. */
	UNIT_SPAN_BYTES = 2 << 20,
};

static int fail(struct error *error, int err, const char *what)
{
	return error_set(error, err, "%s: %s", what, strerror(-err));
}

/* ---- Placing ---- */

static int unit_end(struct data *data)
{
	uint8_t digest[DATA_DIGEST_BYTES];

	if (!EVP_DigestFinal_ex(data->unit, digest, NULL) ||
	    !EVP_DigestInit_ex(data->unit, data->sha256, NULL))
		return -ENOMEM;
	data->unit_bytes = 0;
	data->counts.digests++;
	return spool_append(&data->digests, digest, sizeof(digest));
}

static int digest_units(struct data *data, const uint8_t *bytes, size_t length)
{
	int ret = 0;

	while (!ret && length) {
		size_t part = data->params.unit_bytes - data->unit_bytes;

		if (part > length)
			part = length;
		if (!EVP_DigestUpdate(data->unit, bytes, part))
			return -ENOMEM;
		data->unit_bytes += part;
		bytes += part;
		length -= part;
		if (data->unit_bytes == data->params.unit_bytes)
			ret = unit_end(data);
	}
	return ret;
}

/* Leaves a gap up to the end of the unit. */
static int end_unit(struct data *data)
{
	static const uint8_t zeroes[SECTOR_BYTES];
	uint64_t end = round_up_u64(data->counts.object_bytes, data->params.unit_bytes);
	uint64_t bytes = end - data->counts.object_bytes;
	struct data_gap *gaps;
	int ret = 0;

	if (!bytes)
		return 0;
	gaps = reallocarray(data->gaps, data->gap_count + 1, sizeof(*gaps));
	if (!gaps)
		return -ENOMEM;
	data->gaps = gaps;
	gaps[data->gap_count++] = (struct data_gap){ data->counts.object_bytes, bytes };
	for (uint64_t done = 0; done < bytes && !ret; done += SECTOR_BYTES) {
		ret = spool_append(&data->csums, zeroes, data->params.csum->bytes);
		if (!ret)
			ret = digest_units(data, zeroes, SECTOR_BYTES);
	}
	data->counts.object_bytes = end;
	return ret;
}

/* The place in its origin of the last byte of a piece that fits into the `room` of a unit. */
static uint64_t origin_end(const struct piece *piece, uint64_t room)
{
	uint64_t end = 0;

	for (unsigned i = 0; i < piece->origin_count && piece->origins[i].place < room; i++) {
		const struct piece_origin *origin = &piece->origins[i];
		uint64_t left = room - origin->place;

		end = origin->offset + (origin->bytes < left ? origin->bytes : left);
	}
	return end;
}

/* Notes where the content of a piece comes from, which begins at a unit if it has to. */
static int note_origins(struct data *data, const struct piece *piece)
{
	uint64_t unit_bytes = data->params.unit_bytes;
	uint64_t used = data->counts.object_bytes % unit_bytes;
	int ret = 0;

	if (used && origin_end(piece, unit_bytes - used) - data->unit_offset > UNIT_SPAN_BYTES)
		ret = end_unit(data);
	for (unsigned i = 0; i < piece->origin_count && !ret; i++) {
		const struct piece_origin *from = &piece->origins[i];
		struct data_origin origin = {
			.object_offset = data->counts.object_bytes + from->place,
			.offset = from->offset,
			.bytes = from->bytes,
		};
		uint64_t unit = (origin.object_offset + origin.bytes - 1) / unit_bytes;
		uint64_t start = unit * unit_bytes;

		if (unit != data->unit_number) {
			data->unit_offset =
				origin.offset +
				(start > origin.object_offset ? start - origin.object_offset : 0);
			data->unit_number = unit;
		}
		ret = spool_append(&data->origins, &origin, sizeof(origin));
		data->counts.origins++;
	}
	return ret;
}

/* Appends a piece to the data object. */
static int append(struct data *data, const struct piece *piece, struct share *share)
{
	size_t csum_bytes = piece->stored_bytes / SECTOR_BYTES * data->params.csum->bytes;
	int ret = data->params.in_layers ?
			  note_origins(data, piece) :
			  pwrite_full(data->params.fd, piece->stored, piece->stored_bytes,
				      data->counts.object_bytes);

	if (!ret)
		ret = spool_append(&data->csums, piece->csums, csum_bytes);
	if (!ret)
		ret = digest_units(data, piece->stored, piece->stored_bytes);
	share->data_offset = data->counts.object_bytes;
	share->stored_bytes = piece->stored_bytes;
	share->compression = piece->compression;
	share->uses = piece->inode != NO_INODE;
	data->counts.object_bytes += piece->stored_bytes;
	data->counts.extents++;
	data->counts.compressed += piece->compression != COMPRESSION_NONE;
	return ret;
}

/* Finds or makes the extent that has the content of this piece. */
static int find_or_append(struct data *data, struct piece *piece, struct share *share)
{
	struct share *found = shares_find(&data->shares, piece->digest);
	int ret = 0;

	memcpy(share->digest, piece->digest, sizeof(share->digest));
	if (found && found->uses < SHARE_USES_MAX) {
		if (found->uses) {
			data->counts.shared++;
			data->counts.shared_bytes += piece->bytes;
		}
		found->uses += piece->inode != NO_INODE;
		*share = *found;
		return 0;
	}
	if (!piece->is_stored)
		ret = pieces_store(data->pieces, piece);
	if (!ret)
		ret = append(data, piece, share);
	if (ret)
		return ret;
	if (!found)
		return shares_add(&data->shares, share);
	/* Others may look at the digest meanwhile, so that one stays. */
	found->data_offset = share->data_offset;
	found->stored_bytes = share->stored_bytes;
	found->compression = share->compression;
	found->uses = share->uses;
	return 0;
}

/* Places the oldest piece. */
static int place(struct data *data, struct piece *piece, struct error *error)
{
	struct model_extent extent = {
		.file_offset = piece->file_offset,
		.bytes = piece->bytes,
	};
	struct share share = { 0 };
	bool is_of_file = piece->inode != NO_INODE;
	int ret = piece->error;

	if (!ret && is_of_file &&
	    !EVP_DigestUpdate(data->content, piece->digest, sizeof(piece->digest)))
		ret = -ENOMEM;
	if (!ret)
		ret = find_or_append(data, piece, &share);
	if (ret)
		return fail(error, ret, "cannot write the data object");
	extent.data_offset = share.data_offset;
	extent.stored_bytes = share.stored_bytes;
	extent.compression = share.compression;
	if (is_of_file)
		ret = model_add_extent(data->model, piece->inode, &extent, error);
	pieces_release(data->pieces);
	return ret;
}

int data_drain(struct data *data, struct error *error)
{
	struct piece *piece;
	int ret = 0;

	while (!ret && (piece = pieces_oldest(data->pieces)))
		ret = place(data, piece, error);
	return ret;
}

/* ---- Taking content ---- */

static struct data *of_sink(struct content_sink *sink)
{
	return container_of(sink, struct data, sink);
}

static int begin(struct content_sink *sink, uint32_t inode, uint64_t bytes, struct error *error)
{
	struct data *data = of_sink(sink);

	data->inode = inode;
	data->file_bytes = bytes;
	data->position = 0;
	data->is_inline = bytes <= data->params.max_inline;
	data->has_content = false;
	data->is_passed_over = data->first && (data->is_inline ||
					       !first_begin(data->first, data->first_model, inode));
	return 0;
}

/* Makes sure that there is a piece to fill, at the present position. */
static int open_piece(struct data *data, struct error *error)
{
	int ret = 0;

	while (!data->piece && !ret) {
		data->piece = pieces_next(data->pieces);
		if (!data->piece)
			ret = place(data, pieces_oldest(data->pieces), error);
	}
	if (ret)
		return ret;
	data->piece->inode = data->inode;
	data->piece->comes_first = data->inode == NO_INODE;
	data->piece->file_offset = data->position;
	data->piece->bytes = 0;
	data->piece->origin_count = 0;
	return 0;
}

/* The next bytes of the piece come from there. */
static int add_origin(struct piece *piece, uint64_t offset, size_t bytes)
{
	struct piece_origin *last = piece->origins + piece->origin_count;

	if (piece->origin_count && last[-1].place + last[-1].bytes == piece->bytes &&
	    last[-1].offset + last[-1].bytes == offset) {
		last[-1].bytes += (uint32_t)bytes;
		return 0;
	}
	if (array_reserve(piece->origins, piece->origin_room, piece->origin_count + 1))
		return -ENOMEM;
	piece->origins[piece->origin_count++] =
		(struct piece_origin){ piece->bytes, (uint32_t)bytes, offset };
	return 0;
}

static int end_piece(struct data *data, struct error *error)
{
	struct piece *piece = data->piece;
	uint32_t padded;
	int ret;

	if (!piece)
		return 0;
	padded = (uint32_t)round_up_u64(piece->bytes, SECTOR_BYTES);
	memset(piece->raw + piece->bytes, 0, padded - piece->bytes);
	piece->bytes = padded;
	data->piece = NULL;
	if (!data->first) {
		pieces_submit(data->pieces);
		return 0;
	}
	ret = first_take(data->first, piece->file_offset, piece->raw, piece->bytes);
	return ret ? fail(error, ret, "cannot keep the content that comes first") : 0;
}

/* Takes content, or zeroes if `bytes` is NULL. */
static int take(struct data *data, const uint8_t *bytes, uint64_t length, struct error *error)
{
	const uint8_t *first = bytes;
	int ret = 0;

	while (length) {
		size_t part = data->piece_bytes;

		if (!data->piece)
			ret = open_piece(data, error);
		if (ret)
			return ret;
		part -= data->piece->bytes;
		if (part > length)
			part = length;
		if (bytes && data->params.in_layers &&
		    add_origin(data->piece, data->sink.offset + (uint64_t)(bytes - first), part))
			return error_set(error, -ENOMEM, "no memory");
		if (bytes)
			memcpy(data->piece->raw + data->piece->bytes, bytes, part);
		else
			memset(data->piece->raw + data->piece->bytes, 0, part);
		data->piece->bytes += (uint32_t)part;
		data->position += part;
		bytes = bytes ? bytes + part : NULL;
		length -= part;
		if (data->piece->bytes == data->piece_bytes)
			ret = end_piece(data, error);
		if (ret)
			return ret;
	}
	return 0;
}

static int check_length(const struct data *data, uint64_t length, struct error *error)
{
	if (length <= data->file_bytes - data->position)
		return 0;
	return error_set(error, -EINVAL, "a file has more than its %llu bytes",
			 (unsigned long long)data->file_bytes);
}

static int take_data(struct content_sink *sink, const void *bytes, size_t length,
		     struct error *error)
{
	struct data *data = of_sink(sink);
	int ret = check_length(data, length, error);

	if (ret)
		return ret;
	if (data->is_passed_over) {
		data->position += length;
		return 0;
	}
	data->has_content = true;
	if (!data->first)
		data->counts.content_bytes += length;
	if (!data->is_inline)
		return take(data, bytes, length, error);
	memcpy(data->inline_bytes + data->position, bytes, length);
	data->position += length;
	return 0;
}

/*
 * Only whole sectors can be holes: what a hole has of the sectors at its ends is stored as zeroes.
 * But that is not needed behind the last content.
 */
static int take_hole(struct content_sink *sink, uint64_t length, struct error *error)
{
	struct data *data = of_sink(sink);
	uint64_t before, whole;
	int ret = check_length(data, length, error);

	if (ret)
		return ret;
	if (data->is_passed_over || data->is_inline) {
		if (data->is_inline)
			memset(data->inline_bytes + data->position, 0, length);
		data->position += length;
		return 0;
	}
	before = round_up_u64(data->position, SECTOR_BYTES) - data->position;
	if (before > length)
		before = length;
	ret = take(data, NULL, before, error);
	if (ret)
		return ret;
	length -= before;
	whole = data->position + length == data->file_bytes ? length :
							      length - length % SECTOR_BYTES;
	if (whole)
		ret = end_piece(data, error);
	if (ret)
		return ret;
	data->position += whole;
	return take(data, NULL, length - whole, error);
}

static int spool_inline(struct data *data, struct error *error)
{
	uint64_t offset = data->inlines.bytes;
	uint32_t bytes = (uint32_t)data->file_bytes;
	int ret = spool_append(&data->inlines, data->inline_bytes, bytes);

	if (ret)
		return fail(error, ret, "cannot keep the content of small files");
	data->counts.inline_files++;
	data->counts.inline_bytes += bytes;
	model_set_spooled(data->model, data->inode, offset, bytes, COMPRESSION_NONE);
	return 0;
}

static int end(struct content_sink *sink, struct error *error)
{
	struct data *data = of_sink(sink);

	if (data->position != data->file_bytes)
		return error_set(error, -EINVAL, "a file of %llu bytes ends after %llu",
				 (unsigned long long)data->file_bytes,
				 (unsigned long long)data->position);
	if (data->is_inline)
		return data->has_content ? spool_inline(data, error) : 0;
	return end_piece(data, error);
}

static const struct content_sink_ops sink_ops = {
	.begin = begin,
	.data = take_data,
	.hole = take_hole,
	.end = end,
};

/* ---- What comes first ---- */

void data_collect(struct data *data, struct first *first, const struct model *model)
{
	data->first = first;
	data->first_model = model;
}

static int place_first(struct data *data, const struct first_piece *kept, struct error *error)
{
	int ret;

	data->inode = NO_INODE;
	data->position = kept->file_offset;
	ret = open_piece(data, error);
	if (ret)
		return ret;
	ret = first_read(data->first, kept, data->piece->raw);
	if (ret)
		return fail(error, ret, "cannot read the content that comes first");
	data->piece->bytes = kept->bytes;
	data->piece = NULL;
	pieces_submit(data->pieces);
	return 0;
}

int data_place_first(struct data *data, struct error *error)
{
	size_t count;
	_cleanup_free_ struct first_piece *pieces = first_sorted(data->first, &count);
	int ret = pieces ? 0 : error_set(error, -ENOMEM, "no memory");

	for (size_t i = 0; i < count && !ret; i++)
		ret = place_first(data, &pieces[i], error);
	if (!ret)
		ret = data_drain(data, error);
	data->counts.first_bytes = data->counts.object_bytes;
	data_collect(data, NULL, NULL);
	return ret;
}

/* ---- Life ---- */

static int open_parts(struct data *data)
{
	struct pieces_params params = {
		.piece_bytes = data->piece_bytes,
		.level = data->params.level,
		.threads = data->params.threads,
		.csum = data->params.csum,
		.shares = &data->shares,
	};
	int ret = crypto_is_ready() ? 0 : -ENOMEM;

	if (ret)
		return ret;
	ret = spool_open(&data->inlines, data->params.directory);
	if (!ret)
		ret = spool_open(&data->csums, data->params.directory);
	if (!ret)
		ret = spool_open(&data->digests, data->params.directory);
	if (!ret && data->params.in_layers)
		ret = spool_open(&data->origins, data->params.directory);
	if (!ret)
		ret = shares_init(&data->shares);
	data->sha256 = EVP_MD_fetch(NULL, "SHA256", NULL);
	data->unit = EVP_MD_CTX_new();
	data->content = EVP_MD_CTX_new();
	if (!ret && (!data->sha256 || !data->unit || !data->content ||
		     !EVP_DigestInit_ex(data->unit, data->sha256, NULL) ||
		     !EVP_DigestInit_ex(data->content, data->sha256, NULL)))
		ret = -ENOMEM;
	return ret ?: pieces_open(&data->pieces, &params);
}

int data_open(struct data **made, const struct data_params *params, struct model *model,
	      struct error *error)
{
	struct data *data = calloc(1, sizeof(*data));
	int ret;

	*made = data;
	if (!data)
		return error_set(error, -ENOMEM, "no memory");
	data->sink.ops = &sink_ops;
	data->params = *params;
	data->model = model;
	data->unit_number = UINT64_MAX;
	data->inlines = data->csums = data->digests = data->origins = SPOOL_CLOSED;
	data->piece_bytes = params->level ? PIECE_COMPRESSED_BYTES : PIECE_PLAIN_BYTES;
	ret = open_parts(data);
	return ret ? fail(error, ret, "cannot prepare to store content") : 0;
}

void data_close(struct data *data)
{
	if (!data)
		return;
	pieces_close(data->pieces);
	shares_deinit(&data->shares);
	spool_close(&data->inlines);
	spool_close(&data->csums);
	spool_close(&data->digests);
	spool_close(&data->origins);
	free(data->gaps);
	EVP_MD_CTX_free(data->unit);
	EVP_MD_CTX_free(data->content);
	EVP_MD_free(data->sha256);
	free(data);
}

struct content_sink *data_sink(struct data *data)
{
	return &data->sink;
}

int data_end_layer(struct data *data, struct error *error)
{
	int ret = end_unit(data);

	return ret ? fail(error, ret, "cannot compute digests") : 0;
}

int data_finish(struct data *data, struct error *error)
{
	int ret = data_drain(data, error);

	/* Only the sources that were read twice can have been changed in between. */
	if (!ret && data->counts.first_bytes && shares_has_unused(&data->shares))
		ret = error_set(error, -EAGAIN,
				"content that was to come first was not found again: the source "
				"was changed while it was read");
	if (ret || !data->unit_bytes)
		return ret;
	ret = unit_end(data);
	return ret ? fail(error, ret, "cannot compute digests") : 0;
}

int data_digest(const struct data *data, uint8_t digest[DATA_DIGEST_BYTES])
{
	EVP_MD_CTX *copy = EVP_MD_CTX_new();
	int ret = copy && EVP_MD_CTX_copy_ex(copy, data->content) &&
				  EVP_DigestFinal_ex(copy, digest, NULL) ?
			  0 :
			  -ENOMEM;

	EVP_MD_CTX_free(copy);
	return ret;
}

const struct data_counts *data_counts(const struct data *data)
{
	return &data->counts;
}

int data_read_inline(struct data *data, uint64_t offset, void *bytes, size_t length)
{
	return spool_read(&data->inlines, offset, bytes, length);
}

int data_read_csums(struct data *data, uint64_t first_sector, void *csums, size_t bytes)
{
	return spool_read(&data->csums, first_sector * data->params.csum->bytes, csums, bytes);
}

int data_read_digests(struct data *data, uint64_t first, void *digests, size_t bytes)
{
	return spool_read(&data->digests, first * DATA_DIGEST_BYTES, digests, bytes);
}

int data_read_origins(struct data *data, uint64_t first, struct data_origin *origins, size_t count)
{
	return spool_read(&data->origins, first * sizeof(*origins), origins,
			  count * sizeof(*origins));
}

const struct data_gap *data_gaps(const struct data *data, size_t *count)
{
	*count = data->gap_count;
	return data->gaps;
}
