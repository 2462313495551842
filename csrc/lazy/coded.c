/* SPDX-License-Identifier: MIT */
#include "lazy/coded.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/cleanup.h"
#include "lazy/codec.h"
#include "lazy/fetcher.h"
#include "lazy/run.h"
#include "lazy/selection.h"
#include "lazy/store.h"

/* Of ranges, compressed and decoded, all of a fetcher's; one always fits. */
enum { CODED_BUFFERS_MAX = 16 << 20 };

/* The kind of a mirror: that of the map's text, but for how it runs. */
struct coded_kind {
	struct mirror_ops ops;
	const struct mirror_ops *inner;
	struct store *store;
};

/* What a fetcher's coded runs share. */
struct coded_buffers {
	struct fetcher_attachment attachment;
	uint64_t bytes;
	struct link waiting;
};

struct coded_run {
	struct pool_job job;
	struct link link; /* while it waits for memory */
	struct run *run;
	const struct coded_kind *kind;
	struct coded_buffers *buffers;
	struct coded_range range;
	enum { CODED_WAITING, CODED_ARRIVING, CODED_DECODING, CODED_GIVING } state;
	bool given_up;
	uint8_t *coded; /* the range of the object */
	uint32_t filled;
	/* What the core has asked for, and where that belongs. */
	const struct run_sink *sink;
	uint64_t offset;
	uint32_t length;
	uint8_t *
		data; /* what has been decoded, malloc()ed; or the core's own place for all of it */
	bool in_place;
	uint32_t given; /* bytes of it */
	int err;
};

static const char buffers_key;

static void close_buffers(struct fetcher_attachment *attachment)
{
	free(container_of(attachment, struct coded_buffers, attachment));
}

static struct coded_buffers *buffers_of(struct fetcher *fetcher)
{
	struct fetcher_attachment *attachment = fetcher_attached(fetcher, &buffers_key);
	struct coded_buffers *buffers;

	if (attachment)
		return container_of(attachment, struct coded_buffers, attachment);
	buffers = calloc(1, sizeof(*buffers));
	if (!buffers)
		return NULL;
	buffers->attachment.key = &buffers_key;
	buffers->attachment.close = close_buffers;
	list_init(&buffers->waiting);
	fetcher_attach(fetcher, &buffers->attachment);
	return buffers;
}

static struct coded_run *coded_of(const struct run *run)
{
	return run->coded;
}

static bool has_room(const struct coded_run *coded)
{
	const struct coded_buffers *buffers = coded->buffers;

	return !buffers->bytes ||
	       buffers->bytes + coded->range.length + coded->length <= CODED_BUFFERS_MAX;
}

static int coded_space(struct run *run, struct iovec *parts, int room)
{
	struct coded_run *coded = coded_of(run);

	(void)room;
	parts->iov_base = coded->coded + coded->filled;
	parts->iov_len = coded->range.length - coded->filled;
	return 1;
}

static void coded_take(struct run *run, size_t bytes)
{
	coded_of(run)->filled += (uint32_t)bytes;
}

static uint8_t *coded_take_all(struct run *run, uint8_t *data)
{
	struct coded_run *coded = coded_of(run);
	uint8_t *unused = coded->coded;

	coded->coded = data;
	return unused;
}

static void ask(struct coded_run *coded)
{
	struct run *run = coded->run;

	coded->buffers->bytes += coded->range.length + coded->length;
	coded->state = CODED_ARRIVING;
	run->offset = coded->range.offset;
	run->length = coded->range.length;
	coded->coded = malloc(run->length);
	if (coded->coded)
		coded->kind->inner->start(run);
	else
		run_failed(run, -ENOMEM, FETCH_TRANSIENT, "no memory for %u bytes", run->length);
}

/* Gives the core its run back, with what has become of it. */
static void end(struct coded_run *coded)
{
	struct coded_buffers *buffers = coded->buffers;
	struct run *run = coded->run;
	struct link *link;

	if (coded->state != CODED_WAITING)
		buffers->bytes -= coded->range.length + coded->length;
	free(coded->coded);
	if (!coded->in_place)
		free(coded->data);
	run->offset = coded->offset;
	run->length = coded->length;
	run->sink = coded->sink;
	run->coded = NULL;
	free(coded);
	run->sink->over(run);
	while ((link = list_first(&buffers->waiting))) {
		struct coded_run *next = container_of(link, struct coded_run, link);

		if (!has_room(next))
			break;
		list_remove(link);
		ask(next);
	}
}

/* Makes the parts of all units of a run. Each unit has one at least. */
static int select_parts(struct coded_run *coded, struct codec_part **parts, uint32_t *count)
{
	const struct source *source = coded->run->mirror->source;
	const struct selection *selection = source->selection;
	uint64_t first = coded->offset / selection->unit_bytes;
	uint32_t units = coded->length / selection->unit_bytes, done = 0;
	uint64_t end = selection->units[first].offset, room = 1;
	int err = 0;

	for (uint32_t i = 0; i < units; i++)
		room += selection->units[first + i].pieces;
	*parts = calloc(room, sizeof(**parts));
	if (!*parts)
		return -ENOMEM;
	memset(coded->data, 0, coded->length);
	for (uint32_t i = 0; i < units && !err; i++) {
		const struct selection_unit *unit = &selection->units[first + i];

		err = store_selected(
			coded->kind->store, source, first + i, (uint32_t)(unit->offset - end),
			coded->data + (size_t)i * selection->unit_bytes, *parts + done);
		done += unit->pieces;
		end = unit->offset + unit->length;
	}
	*count = done;
	return err;
}

static void decode(struct pool_job *job)
{
	struct coded_run *coded = container_of(job, struct coded_run, job);
	const struct source *source = coded->run->mirror->source;
	_cleanup_free_ struct codec_part *selected = NULL;
	struct codec_part all = { .length = coded->length };
	uint8_t window[CODEC_WINDOW_BYTES];
	uint32_t window_bytes, count = 1;

	if (!coded->data)
		coded->data = malloc(coded->length);
	all.data = coded->data;
	coded->err = coded->data ? store_window(coded->kind->store, source, coded->range.point,
						window, &window_bytes) :
				   -ENOMEM;
	if (!coded->err && source->selection)
		coded->err = select_parts(coded, &selected, &count);
	if (!coded->err)
		coded->err = codec_decode(source->codec, &coded->range, window, window_bytes,
					  coded->coded, selected ?: &all, count);
}

static void give_up(struct coded_run *coded, const char *why)
{
	struct run *run = coded->run;

	run->result = -ECANCELED;
	run->failure = FETCH_TRANSIENT;
	error_set_text(&run->error, "given up, %s", why);
	end(coded);
}

/* Gives the core what was decoded, as far as it has places for that. */
static void give(struct coded_run *coded)
{
	struct run *run = coded->run;

	coded->state = CODED_GIVING;
	while (coded->given < coded->length) {
		struct iovec part = { .iov_len = coded->length };

		if (!coded->in_place && !coded->sink->space(run, &part, 1)) {
			if (coded->given_up)
				give_up(coded, "its units are not wanted any more");
			return;
		}
		if (!coded->in_place)
			memcpy(part.iov_base, coded->data + coded->given, part.iov_len);
		coded->given += (uint32_t)part.iov_len;
		coded->sink->take(run, part.iov_len);
	}
	end(coded);
}

static void decoded(struct pool_job *job)
{
	struct coded_run *coded = container_of(job, struct coded_run, job);
	struct run *run = coded->run;

	run->result = coded->err;
	if (!coded->err) {
		give(coded);
		return;
	}
	if (coded->err == -EBADMSG) {
		run->failure = FETCH_WRONG;
		error_set_text(&run->error, "%u bytes at %llu are not what the index says (%s)",
			       run->length, (unsigned long long)run->offset,
			       run->mirror->source->codec->name);
	} else {
		run->failure = FETCH_TRANSIENT;
		error_set_text(&run->error, "cannot decode: %s", strerror(-coded->err));
	}
	end(coded);
}

static void coded_over(struct run *run)
{
	struct coded_run *coded = coded_of(run);

	if (run->result) {
		end(coded);
		return;
	}
	coded->state = CODED_DECODING;
	coded->job.work = decode;
	coded->job.done = decoded;
	fetcher_mirror_submit(run->fetcher, &coded->job);
}

static const struct run_sink coded_sink = {
	.space = coded_space,
	.take = coded_take,
	.take_all = coded_take_all,
	.over = coded_over,
};

static void coded_start(struct run *run)
{
	const struct source *source = run->mirror->source;
	struct coded_buffers *buffers = buffers_of(run->fetcher);
	struct coded_run *coded = buffers ? calloc(1, sizeof(*coded)) : NULL;
	struct iovec place = {};

	if (!coded) {
		run_failed(run, -ENOMEM, FETCH_TRANSIENT, "no memory for a request");
		return;
	}
	coded->run = run;
	coded->kind = container_of(run->mirror->ops, struct coded_kind, ops);
	coded->buffers = buffers;
	coded->sink = run->sink;
	coded->offset = run->offset;
	coded->length = run->length;
	/* A single unit is decoded where it belongs. */
	coded->in_place = run->sink->space(run, &place, 1) == 1 && place.iov_len == run->length;
	if (coded->in_place)
		coded->data = place.iov_base;
	selection_plan(source->selection, source->index, run->offset, run->length, &coded->range);
	run->coded = coded;
	run->sink = &coded_sink;
	if (has_room(coded) && list_is_empty(&buffers->waiting))
		ask(coded);
	else
		list_append(&buffers->waiting, &coded->link);
}

static void coded_cancel(struct run *run)
{
	struct coded_run *coded = coded_of(run);

	switch (coded->state) {
	case CODED_WAITING:
		list_remove(&coded->link);
		give_up(coded, "it has waited for memory");
		break;
	case CODED_ARRIVING:
		coded->kind->inner->cancel(run);
		break;
	case CODED_DECODING: /* it ends in a moment */
		coded->given_up = true;
		break;
	case CODED_GIVING:
		give_up(coded, "its units are not wanted any more");
		break;
	}
}

static void coded_resume(struct run *run)
{
	give(coded_of(run));
}

int coded_wrap(struct source *source, struct store *store)
{
	struct coded_kind *kinds = calloc(source->place_count, sizeof(*kinds));

	if (!kinds)
		return -ENOMEM;
	for (unsigned i = 0; i < source->place_count; i++) {
		struct mirror *mirror = &source->mirrors[i];

		kinds[i].ops = *mirror->ops;
		kinds[i].ops.start = coded_start;
		kinds[i].ops.cancel = mirror->ops->cancel ? coded_cancel : NULL;
		kinds[i].ops.resume = coded_resume;
		kinds[i].inner = mirror->ops;
		kinds[i].store = store;
		mirror->ops = &kinds[i].ops;
	}
	source->coded_kinds = kinds;
	return 0;
}
