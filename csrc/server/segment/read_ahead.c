/* SPDX-License-Identifier: MIT */
#include "server/segment/read_ahead.h"

#include "base/size.h"
#include "content/cache.h"
#include "content/layout.h"
#include "content/map.h"
#include "lazy/fetcher.h"

/* Several threads serve one reader, so its reads arrive out of order by up to this much. */
#define OUT_OF_ORDER_BYTES KIB(512)
#define WINDOW_FIRST_BYTES KIB(256)
#define WINDOW_LAST_BYTES MIB(5)
/* A reader must want at least a fourth of the range that it passes. */
#define DENSE_SHARE 4

static struct read_ahead_stream *find_stream(struct read_ahead *state, const struct source *source,
					     uint64_t offset)
{
	struct read_ahead_stream *oldest = &state->streams[0];

	for (unsigned i = 0; i < READ_AHEAD_STREAMS; i++) {
		struct read_ahead_stream *stream = &state->streams[i];

		if (stream->source == source &&
		    offset + OUT_OF_ORDER_BYTES - stream->next <= 2 * OUT_OF_ORDER_BYTES)
			return stream;
		if (stream->used < oldest->used)
			oldest = stream;
	}
	/* The first read of a range is no stream yet. */
	*oldest = (struct read_ahead_stream){ .source = source, .start = offset };
	return oldest;
}

static bool is_all_cached(const struct source *source, uint64_t start, uint64_t end)
{
	const struct cache_object *object = cache_object_of(source);

	return object && cache_has(object, unit_of(source, start), unit_of(source, end - 1));
}

static void ask(struct read_ahead_stream *stream, struct fetcher *fetcher,
		const struct mapping *mapping)
{
	struct source *source = mapping->source;
	uint64_t limit = mapping->source_offset + mapping->length;
	uint64_t start = stream->ahead > stream->next ? stream->ahead : stream->next;
	uint64_t end = stream->next + stream->window;

	if (limit > source->size)
		limit = source->size;
	/* Fetch whole units. */
	end = unit_end_offset(source, unit_of(source, end - 1));
	if (end > limit)
		end = limit;
	if (start >= end)
		return;
	stream->ahead = end;
	if (!is_all_cached(source, start, end))
		fetcher_read_ahead(fetcher, source, start, end - start);
}

/* Random reads that are near each other pass much more than they want. */
static bool is_in_order(const struct read_ahead_stream *stream)
{
	return stream->read * DENSE_SHARE >= stream->next - stream->start;
}

/*
 * How much a reader has read, as far as this read says. Of what is cached, only the reads that come
 * to the next unit are told of: who comes there from nearby has read the unit before it.
 */
static uint64_t amount(const struct read_ahead_stream *stream, uint64_t offset, uint32_t length,
		       bool cached)
{
	uint64_t unit_bytes = stream->source->unit_bytes, end = offset + length, passed;

	if (!cached || !stream->next || end <= stream->next)
		return length;
	passed = end - stream->next < unit_bytes ? end - stream->next : unit_bytes;
	return passed > length ? passed : length;
}

static void note(struct read_ahead *state, struct fetcher *fetcher, const struct mapping *mapping,
		 uint64_t offset, uint32_t length, bool cached)
{
	struct read_ahead_stream *stream = find_stream(state, mapping->source, offset);
	bool first = !stream->next;
	bool advances = offset + length > stream->next;

	stream->used = ++state->clock;
	stream->read += amount(stream, offset, length, cached);
	if (advances)
		stream->next = offset + length;
	if (offset < stream->start)
		stream->start = offset;
	if (first || !advances || !is_in_order(stream))
		return;
	if (!stream->window)
		stream->window = WINDOW_FIRST_BYTES;
	/* So much of the window is left that there is time to ask for a longer rest at once. */
	if (stream->ahead > stream->next + stream->window * 2 / 5)
		return;
	ask(stream, fetcher, mapping);
	stream->window *= 2;
	if (stream->window > WINDOW_LAST_BYTES)
		stream->window = WINDOW_LAST_BYTES;
}

void read_ahead(struct read_ahead *state, struct fetcher *fetcher, const struct mapping *mapping,
		uint64_t offset, uint32_t length, bool cached)
{
	if (__atomic_exchange_n(&state->taken, true, __ATOMIC_ACQUIRE))
		return;
	note(state, fetcher, mapping, offset, length, cached);
	__atomic_store_n(&state->taken, false, __ATOMIC_RELEASE);
}
