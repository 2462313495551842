/* SPDX-License-Identifier: MIT */
/*
 * Walks through the mappings of a part. Computed ranges are filled in, cached ranges are read one
 * after the other through the worker's ring, and all others are given to the fetcher at once, which
 * may finish before or after the walk. After it, the fetcher sends the answer, if the front end lets
 * it; for a request in one piece, without a copy of the bytes.
 */
#include "server/segment/lazy_request.h"

#include <errno.h>
#include <liburing.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>

#include "content/cache.h"
#include "content/layout.h"
#include "content/map.h"
#include "lazy/fetcher.h"
#include "lazy/read.h"
#include "lazy/space.h"
#include "server/engine.h"

/* A range that the fetcher is asked for. */
struct piece {
	struct lazy_read read;
	struct lazy_request *request;
	struct piece *next;
};

struct lazy_request {
	struct io *io;
	uint64_t deadline_ns; /* 0: not set yet */
	struct piece *pieces;
	/* atomic: pieces that the fetcher has, plus 1 for the walk until it is over */
	unsigned left; /* without that, where one piece is the whole request */
	int error;     /* atomic: the error of a piece */
	bool lent;     /* set before the walk is over: who finishes the last piece answers */

	/* The cached range that is being read, at io->part.done. */
	const struct cache_object *reading; /* NULL: none is */
	struct cache_lookup look;
	struct source *source;
	uint64_t source_offset;
	uint32_t length, length_done;

	struct piece first; /* most requests have one */
};

/* Ends the request, and returns its result. */
static int end(struct lazy_request *request)
{
	int error = __atomic_load_n(&request->error, __ATOMIC_RELAXED);

	while (request->pieces) {
		struct piece *piece = request->pieces;

		request->pieces = piece->next;
		if (piece != &request->first)
			free(piece);
	}
	request->io->part.private = NULL;
	free(request);
	return error;
}

/* Whether the walk is over, and this piece is the whole request. */
static bool is_whole(struct lazy_request *request, const struct piece *piece)
{
	return __atomic_load_n(&request->left, __ATOMIC_ACQUIRE) == 1 && request->lent &&
	       piece->read.length == request->io->length;
}

static void piece_done(struct lazy_read *read, int result)
{
	struct piece *piece = container_of(read, struct piece, read);
	struct lazy_request *request = piece->request;
	struct io *io = request->io;
	const uint8_t *data = NULL;

	if (result)
		__atomic_store_n(&request->error, result, __ATOMIC_RELAXED);
	else if (read->found != read->data && is_whole(request, piece))
		data = read->found;
	else if (read->found != read->data)
		memcpy(read->data, read->found, read->length);
	if (__atomic_sub_fetch(&request->left, 1, __ATOMIC_ACQ_REL))
		return;
	if (request->lent)
		engine_answer(io, end(request), data);
	else
		worker_answer(io, 0);
}

/*
 * Gives the range at io->part.done to the fetcher. Returns 0, a negative errno; or PART_PENDING, where
 * that is all of the request: it may have ended by then.
 */
static int fetch(struct segment *segment, struct lazy_request *request, struct source *source,
		 uint64_t offset, uint32_t length)
{
	const struct lazy_segment *lazy = segment->private;
	struct part *part = &request->io->part;
	struct piece *piece = &request->first;
	bool whole;

	if (request->pieces)
		piece = calloc(1, sizeof(*piece));
	if (!piece)
		return -EIO;
	if (!request->deadline_ns)
		request->deadline_ns = lazy->deadline_ns ? clock_now_ns() + lazy->deadline_ns :
							   FETCHER_NO_DEADLINE;
	piece->request = request;
	piece->next = request->pieces;
	request->pieces = piece;
	piece->read.source = source;
	piece->read.offset = offset;
	piece->read.length = length;
	piece->read.data = part->data + part->done;
	piece->read.in_place = true;
	piece->read.deadline_ns = request->deadline_ns;
	piece->read.done = piece_done;
	part->done += length;
	whole = length == request->io->length && engine_lend(request->io);
	request->lent = whole;
	if (!whole)
		__atomic_add_fetch(&request->left, 1, __ATOMIC_RELAXED);
	fetcher_read(lazy->space->fetcher, &piece->read);
	return whole ? PART_PENDING : 0;
}

/* Returns 0 (it was read), -EAGAIN (it must be fetched) or PART_PENDING. */
static int read_cached_now(struct lazy_request *request)
{
	uint8_t *data = request->io->part.data + request->io->part.done;

	while (request->length_done < request->length) {
		struct iovec rest = { data + request->length_done,
				      request->length - request->length_done };
		off_t at = (off_t)(request->source_offset + request->length_done);
		ssize_t moved = preadv(cache_fd(request->reading), &rest, 1, at);

		if (moved < 0 && errno == EINTR)
			continue;
		if (moved <= 0)
			return -EAGAIN;
		request->length_done += (uint32_t)moved;
	}
	return 0;
}

static int read_cached(struct lazy_request *request)
{
	struct io *io = request->io;
	struct io_uring_sqe *sqe;

	if (cache_is_in_memory(request->reading))
		return read_cached_now(request);
	sqe = worker_get_sqe(io->worker);
	io_uring_prep_read(sqe, cache_fd(request->reading),
			   io->part.data + io->part.done + request->length_done,
			   request->length - request->length_done,
			   request->source_offset + request->length_done);
	io_uring_sqe_set_data(sqe, io);
	return PART_PENDING;
}

/* Whether the bytes that were read from the cache are valid. */
static bool is_good(const struct lazy_request *request)
{
	const struct part *part = &request->io->part;

	return cache_lookup_is_valid(request->reading, &request->look) &&
	       cache_verify(request->reading, request->source_offset, part->data + part->done,
			    request->length);
}

/* To be called after read_cached(), and after its completions. */
static int end_cached(struct segment *segment, struct lazy_request *request, int result)
{
	bool counts = !result && is_good(request);

	request->reading = NULL;
	if (!counts)
		return fetch(segment, request, request->source, request->source_offset,
			     request->length);
	request->io->part.done += request->length;
	return 0;
}

static bool is_cached(struct lazy_request *request, const struct source *source, uint64_t offset,
		      uint32_t length)
{
	const struct cache_object *object = cache_object_of(source);

	if (!object || !cache_lookup(object, unit_of(source, offset),
				     unit_of(source, offset + length - 1), &request->look))
		return false;
	request->reading = object;
	return true;
}

static int compute(struct part *part, const struct source *source, uint64_t offset, uint32_t length)
{
	const struct mirror *mirror = &source->mirrors[0];
	uint32_t inside = length;

	if (offset + length > source->size) {
		inside = (uint32_t)(source->size - offset);
		memset(part->data + part->done + inside, 0, length - inside);
	}
	mirror->ops->compute(mirror, offset, inside, part->data + part->done);
	part->done += length;
	return 0;
}

static uint32_t at_most(uint64_t room, uint32_t length)
{
	return room < length ? (uint32_t)room : length;
}

static int read_unmapped(const struct lazy_segment *lazy, struct part *part, uint64_t position)
{
	const struct mapping *next = map_next(lazy->space->map, position);
	uint32_t length = part->length - part->done;

	if (!lazy->unmapped_zero)
		return -EIO;
	/* NB: a mapping may have been added since the search; then the next one finds it. */
	if (next && next->offset > position)
		length = at_most(next->offset - position, length);
	else if (next)
		return 0;
	memset(part->data + part->done, 0, length);
	part->done += length;
	return 0;
}

/* Most reads are near the last one. A mapping that was published once stays as long as the map. */
static const struct mapping *find_mapping(struct lazy_segment *lazy, uint64_t position)
{
	const struct mapping *mapping = __atomic_load_n(&lazy->last, __ATOMIC_ACQUIRE);

	if (mapping && position - mapping->offset < mapping->length)
		return mapping;
	mapping = map_find(lazy->space->map, position);
	if (mapping)
		__atomic_store_n(&lazy->last, mapping, __ATOMIC_RELEASE);
	return mapping;
}

/* For cached ranges, read-ahead needs to know only when a reader passes from unit to unit. */
static bool ends_unit(const struct source *source, uint64_t offset, uint32_t length)
{
	return unit_of(source, offset + length) != unit_of(source, offset);
}

/* Handles what is at io->part.done, up to the end of its mapping or its cached range. */
static int step(struct segment *segment, struct lazy_request *request)
{
	struct lazy_segment *lazy = segment->private;
	struct part *part = &request->io->part;
	uint64_t position = lazy->map_offset + part->offset + part->done;
	const struct mapping *mapping = find_mapping(lazy, position);
	uint64_t offset;
	uint32_t length;
	bool cached;
	int result;

	if (!mapping)
		return read_unmapped(lazy, part, position);
	offset = mapping->source_offset + (position - mapping->offset);
	length = at_most(mapping->offset + mapping->length - position, part->length - part->done);
	if (mapping->source->computed)
		return compute(part, mapping->source, offset, length);
	trace_note(&lazy->space->trace, mapping->source, offset, length);
	cached = is_cached(request, mapping->source, offset, length);
	if (!cached || ends_unit(mapping->source, offset, length))
		read_ahead(&lazy->read_ahead, lazy->space->fetcher, mapping, offset, length,
			   cached);
	if (!cached)
		return fetch(segment, request, mapping->source, offset, length);
	request->source = mapping->source;
	request->source_offset = offset;
	request->length = length;
	request->length_done = 0;
	result = read_cached(request);
	return result == PART_PENDING ? result : end_cached(segment, request, result);
}

static int walk(struct segment *segment, struct lazy_request *request)
{
	struct io *io = request->io;
	int result = 0;

	while (!result && io->part.done < io->part.length)
		result = step(segment, request);
	if (result == PART_PENDING)
		return result;
	/* NB: wait for the pieces that the fetcher has, because it may write to the buffer. */
	if (result)
		__atomic_store_n(&request->error, result, __ATOMIC_RELAXED);
	if (!request->pieces)
		return end(request);
	request->lent = engine_lend(io);
	if (!request->lent)
		worker_expect(io);
	if (__atomic_sub_fetch(&request->left, 1, __ATOMIC_ACQ_REL))
		return PART_PENDING;
	if (request->lent)
		engine_take_back(io);
	else
		worker_expect_no_more(io);
	return end(request);
}

/*
 * The common case: a single mapping whose content is cached in memory, so no state is needed.
 * Returns false without any effect in all other cases.
 */
static bool read_at_once(struct lazy_segment *lazy, struct io *io)
{
	const struct part *part = &io->part;
	uint64_t position = lazy->map_offset + part->offset;
	const struct mapping *mapping = find_mapping(lazy, position);
	struct lazy_request request = { .io = io };
	uint64_t offset;

	if (!mapping || mapping->source->computed ||
	    part->length > mapping->offset + mapping->length - position)
		return false;
	offset = mapping->source_offset + (position - mapping->offset);
	if (ends_unit(mapping->source, offset, part->length) ||
	    !is_cached(&request, mapping->source, offset, part->length) ||
	    !cache_is_in_memory(request.reading))
		return false;
	trace_note(&lazy->space->trace, mapping->source, offset, part->length);
	request.source_offset = offset;
	request.length = part->length;
	return !read_cached_now(&request) && is_good(&request);
}

int lazy_request_begin(struct segment *segment, struct io *io)
{
	struct lazy_request *request;

	if (read_at_once(segment->private, io))
		return 0;
	request = calloc(1, sizeof(*request));
	if (!request)
		return -EIO;
	request->io = io;
	request->left = 1;
	io->part.private = request;
	return walk(segment, request);
}

int lazy_request_complete(struct segment *segment, struct io *io, int result)
{
	struct lazy_request *request = io->part.private;

	/* worker_answer() says that all pieces are there. */
	if (!request->reading)
		return end(request);
	if (result > 0)
		request->length_done += (uint32_t)result;
	if (result == -EINTR || (result > 0 && request->length_done < request->length))
		return read_cached(request);
	/* After an error, or at the end of the file, fetch it. */
	result = request->length_done == request->length ? 0 : -EAGAIN;
	result = end_cached(segment, request, result);
	if (result == PART_PENDING)
		return result;
	if (result)
		__atomic_store_n(&request->error, result, __ATOMIC_RELAXED);
	return walk(segment, request);
}
