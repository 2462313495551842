/* SPDX-License-Identifier: MIT */
#include "fetch/coded.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/cleanup.h"
#include "content/codec.h"
#include "content/selection.h"
#include "content/store.h"
#include "fetch/attachment.h"
#include "fetch/fetcher_ops.h"
#include "fetch/kept.h"
#include "fetch/run.h"

enum {
	/* Of ranges, compressed and decoded, all of a fetcher's; one always fits. */
	CODED_BUFFERS_MAX = 16 << 20,
	/* It is worth waiting for another run that brings so many bytes of a range. */
	SHARED_MIN_BYTES = 16 << 10,
};

/* The kind of a mirror: that of the map's text, but for how it runs. */
struct coded_kind {
	struct mirror_ops ops;
	const struct mirror_ops *inner;
	struct store *store;
};

/* What a fetcher's coded runs share. */
struct coded_buffers {
	struct attachment attachment;
	uint64_t bytes;
	struct link waiting;
	struct link arriving;
	struct kept kept;
};

struct coded_run {
	struct pool_job job;
	struct link link; /* in `waiting` or `arriving` of the buffers */
	struct run *run;
	const struct coded_kind *kind;
	struct coded_buffers *buffers;
	struct coded_range range;
	enum { CODED_WAITING, CODED_ARRIVING, CODED_DEPENDING, CODED_DECODING, CODED_GIVING } state;
	bool given_up;
	uint8_t *coded; /* the range of the object */
	/* What is asked for of it: neighbours need, and may have, what lies before and behind. */
	uint32_t from, until;
	uint32_t filled;
	bool shares; /* others may take what it gets, and it takes what they have got */
	/* One that arrives, and will give it all before `from`. NULL: it is there, or was lost. */
	struct coded_run *before;
	bool lost;
	struct link dependence; /* in its `dependents` */
	struct link dependents; /* those that wait for what this one gets */
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

static void free_buffers(struct kept *kept)
{
	free(container_of(kept, struct coded_buffers, kept));
}

static void close_buffers(struct attachment *attachment)
{
	kept_close(&container_of(attachment, struct coded_buffers, attachment)->kept, free_buffers);
}

static int open_buffers(struct attachment *attachment, struct fetcher *fetcher)
{
	struct coded_buffers *buffers = container_of(attachment, struct coded_buffers, attachment);

	list_init(&buffers->waiting);
	list_init(&buffers->arriving);
	kept_open(&buffers->kept, fetcher->loop);
	return 0;
}

static struct coded_buffers *buffers_of(struct fetcher *fetcher)
{
	static const struct attachment_kind kind = { sizeof(struct coded_buffers), open_buffers,
						     close_buffers };

	return attachment_of(fetcher, &kind);
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

	parts->iov_base = coded->coded + coded->filled;
	parts->iov_len = coded->until - coded->filled;
	return 1;
}

static void coded_take(struct run *run, size_t bytes)
{
	struct coded_run *coded = coded_of(run);

	coded->filled += (uint32_t)bytes;
	/* Those that wait for it are not silent. */
	list_for_each (struct coded_run, other, &coded->dependents, dependence)
		other->run->progress++;
}

/* NB: for kinds that block, whose runs share nothing. */
static uint8_t *coded_take_all(struct run *run, uint8_t *data)
{
	struct coded_run *coded = coded_of(run);
	uint8_t *unused = coded->coded;

	coded->coded = data;
	return unused;
}

static void arrived(struct coded_run *coded);

static struct kept_range kept_range_of(const struct coded_run *coded)
{
	const struct mirror *mirror = coded->run->mirror;

	return (struct kept_range){
		.source = mirror->source->id,
		.mirror = mirror->index,
		.offset = coded->range.offset,
		.length = coded->range.length,
	};
}

/* Finds a run that arrives, and has the beginning of the range. */
static void depend(struct coded_run *coded)
{
	const struct link *all = &coded->buffers->arriving;
	uint64_t offset = coded->range.offset;

	list_for_each (struct coded_run, other, all, link) {
		uint64_t end = other->range.offset + other->range.length;

		if (!other->shares || other->run->mirror != coded->run->mirror ||
		    other->range.offset > offset || end < offset + SHARED_MIN_BYTES)
			continue;
		/* A run without a reader may take long. */
		if (coded->run->demanded && !other->run->demanded)
			continue;
		coded->from = end - offset < coded->range.length ? (uint32_t)(end - offset) :
								   coded->range.length;
		coded->before = other;
		list_append(&other->dependents, &coded->dependence);
		return;
	}
}

/* Takes what others have got, or will get soon. */
static void take_shared(struct coded_run *coded)
{
	struct kept *kept = &coded->buffers->kept;
	struct kept_range range = kept_range_of(coded);

	coded->from = kept_beginning(kept, &range, coded->coded);
	if (coded->from < SHARED_MIN_BYTES)
		depend(coded);
	if (coded->from < coded->until)
		coded->until -= kept_end(kept, &range, coded->from, coded->coded);
}

static void ask(struct coded_run *coded)
{
	struct run *run = coded->run;

	coded->buffers->bytes += coded->range.length + coded->length;
	coded->state = CODED_ARRIVING;
	coded->until = coded->range.length;
	coded->coded = malloc(coded->range.length);
	if (coded->coded && coded->shares)
		take_shared(coded);
	list_append(&coded->buffers->arriving, &coded->link);
	coded->filled = coded->from;
	run->offset = coded->range.offset + coded->from;
	run->length = coded->until - coded->from;
	run->coded_bytes = run->length;
	if (!coded->coded)
		run_lacks_memory(run);
	else if (run->length)
		coded->kind->inner->start(run);
	else
		arrived(coded);
}

static void give_up(struct coded_run *coded, const char *why);

/* What it has waited for does not come. Nobody is charged with that twice. */
static void yield(struct coded_run *coded)
{
	coded->run->uncharged = true;
	give_up(coded, "what it shares with another request has not come");
}

static void lose_dependents(struct coded_run *coded)
{
	struct link *link;

	while ((link = list_first(&coded->dependents))) {
		struct coded_run *other = container_of(link, struct coded_run, dependence);

		list_remove(link);
		other->before = NULL;
		other->lost = true;
		if (other->state == CODED_DEPENDING)
			yield(other);
	}
}

/* Gives the core its run back, with what has become of it. */
static void end(struct coded_run *coded)
{
	struct coded_buffers *buffers = coded->buffers;
	struct run *run = coded->run;
	struct link *link;

	list_remove(&coded->link);
	list_remove(&coded->dependence);
	lose_dependents(coded);
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

/* Keeps what other ranges need too, and gives it those that wait for it. */
static void share(struct coded_run *coded)
{
	const struct codec_index *index = coded->run->mirror->source->index;
	struct kept_range range = kept_range_of(coded), edge = range;
	const struct coded_range *planned = &coded->range;
	uint32_t first = codec_index_first_bytes(index, planned);
	uint32_t last = codec_index_last_bytes(index, planned);
	struct link *link;

	edge.length = first;
	if (planned->skip || (first == range.length && !planned->ends_there))
		kept_add(&coded->buffers->kept, &edge, coded->coded);
	edge.offset = range.offset + range.length - last;
	edge.length = last;
	if (first < range.length && !planned->ends_there)
		kept_add(&coded->buffers->kept, &edge, coded->coded + range.length - last);
	while ((link = list_first(&coded->dependents))) {
		struct coded_run *other = container_of(link, struct coded_run, dependence);

		list_remove(link);
		other->before = NULL;
		memcpy(other->coded, coded->coded + (other->range.offset - range.offset),
		       other->from);
		if (other->state == CODED_DEPENDING)
			arrived(other);
	}
}

/* What it has asked for itself is there. */
static void arrived(struct coded_run *coded)
{
	if (coded->lost) {
		yield(coded);
		return;
	}
	if (coded->before) {
		coded->state = CODED_DEPENDING;
		return;
	}
	list_remove(&coded->link);
	coded->state = CODED_DECODING;
	if (coded->shares)
		share(coded);
	coded->job.work = decode;
	coded->job.done = decoded;
	coded->run->fetcher->ops->submit(coded->run->fetcher, &coded->job);
}

static void coded_over(struct run *run)
{
	struct coded_run *coded = coded_of(run);

	if (run->result)
		end(coded);
	else
		arrived(coded);
}

static const struct run_sink coded_sink = {
	.space = coded_space,
	.take = coded_take,
	.take_all = coded_take_all,
	.over = coded_over,
};

/*
 * Runs of one mirror share what they get, if that is the same object for sure. What has failed is
 * asked for anew as a whole.
 */
static bool may_share(const struct coded_run *coded)
{
	struct run *run = coded->run;
	struct mirror *mirror = run->mirror;
	struct kept_range range = kept_range_of(coded);

	if (run->again)
		kept_drop(&coded->buffers->kept, &range);
	return !run->again && !mirror->ops->blocking &&
	       (mirror->ops->immutable || mirror_object(mirror)->identity);
}

static void coded_start(struct run *run)
{
	const struct source *source = run->mirror->source;
	struct coded_buffers *buffers = buffers_of(run->fetcher);
	struct coded_run *coded = buffers ? calloc(1, sizeof(*coded)) : NULL;
	struct iovec place = {};

	if (!coded) {
		run_lacks_memory(run);
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
	list_init(&coded->dependents);
	coded->shares = may_share(coded);
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
	case CODED_DEPENDING:
		give_up(coded, "what it shares with another request has not come");
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
		kinds[i].ops.ready = NULL;
		kinds[i].ops.cancel = mirror->ops->cancel ? coded_cancel : NULL;
		kinds[i].ops.resume = coded_resume;
		kinds[i].inner = mirror->ops;
		kinds[i].store = store;
		mirror->ops = &kinds[i].ops;
	}
	source->coded_kinds = kinds;
	return 0;
}
