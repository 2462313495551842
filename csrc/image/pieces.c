/* SPDX-License-Identifier: MIT */
#include "image/pieces.h"

#include <errno.h>
#include <openssl/evp.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <zstd.h>
#include <zstd_errors.h>

#include "base/size.h"

/* What comes first keeps a start waiting, and is little: it gets that much more of the CPU. */
enum { FIRST_MORE_LEVELS = 6, LEVEL_MOST = 19 };

struct worker {
	struct pieces *pieces;
	ZSTD_CCtx *zstd;
	pthread_t thread;
	bool is_running;
};

struct pieces {
	struct pieces_params params;
	EVP_MD *sha256;
	struct piece *ring;
	unsigned room;
	/* Positions only grow; the place in the ring is the remainder. */
	uint64_t oldest, begun, submitted;
	bool ending;
	pthread_mutex_t lock;
	pthread_cond_t more; /* for the threads */
	pthread_cond_t done; /* for the caller */
	struct worker *workers;
	struct worker own; /* of the caller */
};

static struct piece *at(const struct pieces *pieces, uint64_t position)
{
	return &pieces->ring[position % pieces->room];
}

static int level_of(const struct pieces *pieces, const struct piece *piece)
{
	int level = pieces->params.level + (piece->comes_first ? FIRST_MORE_LEVELS : 0);

	return level < LEVEL_MOST ? level : LEVEL_MOST;
}

/* Compresses, if that saves a sector at least. */
static int compress(const struct pieces *pieces, ZSTD_CCtx *zstd, struct piece *piece)
{
	size_t room = piece->bytes - SECTOR_BYTES, bytes, padded;

	piece->stored = piece->raw;
	piece->stored_bytes = piece->bytes;
	piece->compression = COMPRESSION_NONE;
	if (!pieces->params.level || !room)
		return 0;
	if (ZSTD_isError(
		    ZSTD_CCtx_setParameter(zstd, ZSTD_c_compressionLevel, level_of(pieces, piece))))
		return -ENOMEM;
	bytes = ZSTD_compress2(zstd, piece->packed, room, piece->raw, piece->bytes);
	if (ZSTD_isError(bytes)) {
		/* It does not fit, thus it does not save enough. */
		if (ZSTD_getErrorCode(bytes) == ZSTD_error_dstSize_tooSmall)
			return 0;
		return -ENOMEM;
	}
	padded = round_up_u64(bytes, SECTOR_BYTES);
	memset(piece->packed + bytes, 0, padded - bytes);
	piece->stored = piece->packed;
	piece->stored_bytes = (uint32_t)padded;
	piece->compression = COMPRESSION_ZSTD;
	return 0;
}

static int store(const struct pieces *pieces, ZSTD_CCtx *zstd, struct piece *piece)
{
	const struct csum_kind *csum = pieces->params.csum;
	int ret = compress(pieces, zstd, piece);

	for (uint32_t i = 0; !ret && i < piece->stored_bytes / SECTOR_BYTES; i++) {
		uint8_t value[CSUM_BYTES];

		csum->compute(piece->stored + (size_t)i * SECTOR_BYTES, SECTOR_BYTES, value);
		memcpy(piece->csums + (size_t)i * csum->bytes, value, csum->bytes);
	}
	piece->is_stored = !ret;
	return ret;
}

static int process(const struct pieces *pieces, ZSTD_CCtx *zstd, struct piece *piece)
{
	if (!EVP_Digest(piece->raw, piece->bytes, piece->digest, NULL, pieces->sha256, NULL))
		return -ENOMEM;
	/*
	 * What is there now is that of pieces before this one, so it will still be there when this
	 * one is placed. What is not there yet may come from a piece that others work on.
	 */
	if (pieces->params.level && shares_has(pieces->params.shares, piece->digest))
		return 0;
	return store(pieces, zstd, piece);
}

static void *work(void *context)
{
	struct worker *worker = context;
	struct pieces *pieces = worker->pieces;

	pthread_mutex_lock(&pieces->lock);
	for (;;) {
		struct piece *piece;
		int ret;

		while (pieces->begun == pieces->submitted && !pieces->ending)
			pthread_cond_wait(&pieces->more, &pieces->lock);
		if (pieces->ending)
			break;
		piece = at(pieces, pieces->begun++);
		pthread_mutex_unlock(&pieces->lock);
		ret = process(pieces, worker->zstd, piece);
		pthread_mutex_lock(&pieces->lock);
		piece->error = ret;
		piece->is_done = true;
		pthread_cond_signal(&pieces->done);
	}
	pthread_mutex_unlock(&pieces->lock);
	return NULL;
}

static int worker_init(struct worker *worker, struct pieces *pieces)
{
	worker->pieces = pieces;
	worker->zstd = ZSTD_createCCtx();
	return worker->zstd ? 0 : -ENOMEM;
}

static int worker_start(struct worker *worker, struct pieces *pieces)
{
	int ret = worker_init(worker, pieces);

	if (!ret)
		ret = -pthread_create(&worker->thread, NULL, work, worker);
	worker->is_running = !ret;
	return ret;
}

static int piece_init(struct piece *piece, const struct pieces_params *params)
{
	*piece = (struct piece){
		.raw = malloc(params->piece_bytes),
		.packed = malloc(params->piece_bytes),
		.csums = malloc(params->piece_bytes / SECTOR_BYTES * params->csum->bytes),
	};
	return piece->raw && piece->packed && piece->csums ? 0 : -ENOMEM;
}

int pieces_open(struct pieces **made, const struct pieces_params *params)
{
	struct pieces *pieces = calloc(1, sizeof(*pieces));
	int ret = 0;

	if (!pieces)
		return -ENOMEM;
	*made = pieces;
	pieces->params = *params;
	pthread_mutex_init(&pieces->lock, NULL);
	pthread_cond_init(&pieces->more, NULL);
	pthread_cond_init(&pieces->done, NULL);
	pieces->room = 4 * params->threads + 4;
	pieces->ring = calloc(pieces->room, sizeof(*pieces->ring));
	pieces->workers = calloc(params->threads, sizeof(*pieces->workers));
	pieces->sha256 = EVP_MD_fetch(NULL, "SHA256", NULL);
	if (!pieces->ring || !pieces->workers || !pieces->sha256)
		return -ENOMEM;
	for (unsigned i = 0; i < pieces->room && !ret; i++)
		ret = piece_init(&pieces->ring[i], params);
	if (!ret)
		ret = worker_init(&pieces->own, pieces);
	for (unsigned i = 0; i < params->threads && !ret; i++)
		ret = worker_start(&pieces->workers[i], pieces);
	return ret;
}

void pieces_close(struct pieces *pieces)
{
	if (!pieces)
		return;
	pthread_mutex_lock(&pieces->lock);
	pieces->ending = true;
	pthread_cond_broadcast(&pieces->more);
	pthread_mutex_unlock(&pieces->lock);
	for (unsigned i = 0; pieces->workers && i < pieces->params.threads; i++) {
		if (pieces->workers[i].is_running)
			pthread_join(pieces->workers[i].thread, NULL);
		ZSTD_freeCCtx(pieces->workers[i].zstd);
	}
	ZSTD_freeCCtx(pieces->own.zstd);
	for (unsigned i = 0; pieces->ring && i < pieces->room; i++) {
		free(pieces->ring[i].raw);
		free(pieces->ring[i].packed);
		free(pieces->ring[i].csums);
		free(pieces->ring[i].origins);
	}
	pthread_mutex_destroy(&pieces->lock);
	pthread_cond_destroy(&pieces->more);
	pthread_cond_destroy(&pieces->done);
	EVP_MD_free(pieces->sha256);
	free(pieces->workers);
	free(pieces->ring);
	free(pieces);
}

struct piece *pieces_next(struct pieces *pieces)
{
	struct piece *piece = at(pieces, pieces->submitted);

	if (pieces->submitted - pieces->oldest == pieces->room)
		return NULL;
	piece->is_done = piece->is_stored = false;
	return piece;
}

void pieces_submit(struct pieces *pieces)
{
	pthread_mutex_lock(&pieces->lock);
	pieces->submitted++;
	pthread_cond_signal(&pieces->more);
	pthread_mutex_unlock(&pieces->lock);
}

struct piece *pieces_oldest(struct pieces *pieces)
{
	struct piece *piece = at(pieces, pieces->oldest);

	if (pieces->oldest == pieces->submitted)
		return NULL;
	pthread_mutex_lock(&pieces->lock);
	while (!piece->is_done)
		pthread_cond_wait(&pieces->done, &pieces->lock);
	pthread_mutex_unlock(&pieces->lock);
	return piece;
}

void pieces_release(struct pieces *pieces)
{
	pieces->oldest++;
}

int pieces_store(struct pieces *pieces, struct piece *piece)
{
	return store(pieces, pieces->own.zstd, piece);
}
