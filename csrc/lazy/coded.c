/* SPDX-License-Identifier: MIT */
#include "lazy/coded.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "lazy/codec.h"
#include "lazy/fetcher.h"
#include "lazy/store.h"

/* Of compressed ranges, all of a fetcher's; one always fits. Units have memory of their own. */
enum { CODED_BUFFERS_MAX = 16 << 20 };

/* The kind of a mirror: that of the map's text, but for how it fetches. */
struct coded_kind {
	struct mirror_ops ops;
	const struct mirror_ops *inner;
	struct store *store;
};

/* What a fetcher's coded fetches share. */
struct coded_buffers {
	struct fetcher_attachment attachment;
	uint64_t bytes;
	struct link waiting;
};

struct coded_fetch {
	struct pool_job job;
	struct link link; /* while it waits for memory */
	struct fetch *fetch;
	const struct coded_kind *kind;
	struct coded_buffers *buffers;
	struct coded_range range;
	enum { CODED_WAITING, CODED_ARRIVING, CODED_DECODING } state;
	/* What the fetcher has asked for, and where it belongs. */
	uint64_t offset;
	uint32_t length;
	uint8_t *data;
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

static const struct coded_kind *kind_of(const struct fetch *fetch)
{
	return container_of(fetch->mirror->ops, struct coded_kind, ops);
}

static bool has_room(const struct coded_fetch *coded)
{
	const struct coded_buffers *buffers = coded->buffers;

	return !buffers->bytes || buffers->bytes + coded->range.length <= CODED_BUFFERS_MAX;
}

static void ask(struct coded_fetch *coded)
{
	struct fetch *fetch = coded->fetch;

	coded->buffers->bytes += coded->range.length;
	coded->state = CODED_ARRIVING;
	fetch->offset = coded->range.offset;
	fetch->length = coded->range.length;
	fetch->data = malloc(fetch->length);
	if (fetch->data)
		coded->kind->inner->fetch(fetch);
	else
		fetch_failed(fetch, -ENOMEM, FETCH_TRANSIENT, "no memory for %u bytes",
			     fetch->length);
}

/* Gives the fetcher its fetch back, with what has become of it. */
static void end(struct coded_fetch *coded)
{
	struct coded_buffers *buffers = coded->buffers;
	struct fetch *fetch = coded->fetch;
	struct link *link;

	if (coded->state != CODED_WAITING) {
		free(fetch->data);
		buffers->bytes -= coded->range.length;
	}
	fetch->offset = coded->offset;
	fetch->length = coded->length;
	fetch->data = coded->data;
	fetch->coded = NULL;
	free(coded);
	fetch_done(fetch);
	while ((link = list_first(&buffers->waiting))) {
		struct coded_fetch *next = container_of(link, struct coded_fetch, link);

		if (!has_room(next))
			break;
		list_remove(link);
		ask(next);
	}
}

static void decode(struct pool_job *job)
{
	struct coded_fetch *coded = container_of(job, struct coded_fetch, job);
	const struct source *source = coded->fetch->mirror->source;
	uint8_t window[CODEC_WINDOW_BYTES];
	uint32_t window_bytes;

	coded->err =
		store_window(coded->kind->store, source, coded->range.point, window, &window_bytes);
	if (!coded->err)
		coded->err = codec_decode(source->codec, &coded->range, window, window_bytes,
					  coded->fetch->data, coded->data, coded->length);
}

static void decoded(struct pool_job *job)
{
	struct coded_fetch *coded = container_of(job, struct coded_fetch, job);
	struct fetch *fetch = coded->fetch;

	fetch->result = coded->err;
	if (coded->err == -EBADMSG) {
		fetch->failure = FETCH_WRONG;
		error_set_text(&fetch->error, "%u bytes at %llu are not what the index says (%s)",
			       fetch->length, (unsigned long long)fetch->offset,
			       fetch->mirror->source->codec->name);
	} else if (coded->err) {
		fetch->failure = FETCH_TRANSIENT;
		error_set_text(&fetch->error, "cannot decode: %s", strerror(-coded->err));
	}
	if (coded->err) {
		free(fetch->identity);
		fetch->identity = NULL;
	}
	end(coded);
}

void coded_arrived(struct fetch *fetch)
{
	struct coded_fetch *coded = fetch->coded;

	if (fetch->result) {
		end(coded);
		return;
	}
	coded->state = CODED_DECODING;
	coded->job.work = decode;
	coded->job.done = decoded;
	fetcher_mirror_submit(fetch->fetcher, &coded->job);
}

static void coded_fetch(struct fetch *fetch)
{
	const struct source *source = fetch->mirror->source;
	struct coded_buffers *buffers = buffers_of(fetch->fetcher);
	struct coded_fetch *coded = buffers ? calloc(1, sizeof(*coded)) : NULL;

	if (!coded) {
		fetch_failed(fetch, -ENOMEM, FETCH_TRANSIENT, "no memory for a request");
		return;
	}
	coded->fetch = fetch;
	coded->kind = kind_of(fetch);
	coded->buffers = buffers;
	coded->offset = fetch->offset;
	coded->length = fetch->length;
	coded->data = fetch->data;
	codec_index_plan(source->index, fetch->offset, fetch->length, &coded->range);
	fetch->coded = coded;
	if (has_room(coded) && list_is_empty(&buffers->waiting))
		ask(coded);
	else
		list_append(&buffers->waiting, &coded->link);
}

static void coded_cancel(struct fetch *fetch)
{
	struct coded_fetch *coded = fetch->coded;

	switch (coded->state) {
	case CODED_WAITING:
		list_remove(&coded->link);
		fetch_failed(fetch, -ECANCELED, FETCH_TRANSIENT,
			     "given up, it has waited for memory");
		break;
	case CODED_ARRIVING:
		coded->kind->inner->cancel(fetch);
		break;
	case CODED_DECODING: /* it ends in a moment */
		break;
	}
}

int coded_wrap(struct source *source, struct store *store)
{
	struct coded_kind *kinds = calloc(source->place_count, sizeof(*kinds));

	if (!kinds)
		return -ENOMEM;
	for (unsigned i = 0; i < source->place_count; i++) {
		struct mirror *mirror = &source->mirrors[i];

		kinds[i].ops = *mirror->ops;
		kinds[i].ops.fetch = coded_fetch;
		kinds[i].ops.cancel = mirror->ops->cancel ? coded_cancel : NULL;
		kinds[i].inner = mirror->ops;
		kinds[i].store = store;
		mirror->ops = &kinds[i].ops;
	}
	source->coded_kinds = kinds;
	return 0;
}
