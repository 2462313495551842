/* SPDX-License-Identifier: MIT */
#include "lazy/mirror/object.h"

#include <errno.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/cleanup.h"
#include "lazy/fetcher.h"
#include "lazy/mirror/exchange.h"

/* W/"..." promises the same meaning only, not the same bytes (RFC 9110, 8.8.1). */
char *object_identity(const struct answer *answer)
{
	char *text = NULL;
	int length = 0;

	if (answer->etag[0] == '"')
		length = asprintf(&text, "etag %s", answer->etag);
	else if (answer->last_modified[0])
		length = asprintf(&text, "modified %s", answer->last_modified);
	return length < 0 ? NULL : text;
}

struct object_fetch {
	struct exchange exchange;
	const struct object_ops *ops;
	struct fetch *fetch;
	char *pinned; /* what was sent as If-Range is of it */
};

static void report(const struct exchange *exchange, struct fetch *fetch)
{
	fetch->result = exchange->result;
	fetch->failure = exchange->failure;
	fetch->retry_after_ms = exchange->retry_after_ms;
	fetch->complaint = exchange->complaint;
	fetch->cut = exchange->cut;
}

/*
 * With If-Range, the answer to "it is another one" is all of that (200). One that names no object at all
 * may be of somebody on the way.
 */
static bool is_another(const struct exchange *exchange, const char *pinned, const char *identity)
{
	unsigned status = exchange->answer.status;

	if (exchange->result && (status != 200 || !identity))
		return false;
	return pinned && (!identity || strcmp(pinned, identity) != 0);
}

static void say_changed(struct fetch *fetch, const char *pinned, const char *identity)
{
	fetch->complaint = (struct complaint){};
	fetch->failure = FETCH_CHANGED;
	fetch->result = complain(&fetch->complaint, -ESTALE,
				 "the object is another one now: '%s', and was '%s'",
				 identity ? identity : "(nothing to know it by)", pinned);
}

static void on_done(struct exchange *exchange)
{
	struct object_fetch *object = container_of(exchange, struct object_fetch, exchange);
	struct fetch *fetch = object->fetch;
	/* NB: it may have been pinned since the request was made. */
	const char *pinned = fetch->mirror->identity;
	char *identity = NULL;

	if (object->ops->identity)
		identity = object->ops->identity(&exchange->answer);
	report(exchange, fetch);
	if (is_another(exchange, pinned, identity)) {
		say_changed(fetch, pinned, identity);
	} else if (!exchange->result && !pinned) {
		fetch->identity = identity;
		identity = NULL;
	}
	free(identity);
	exchange_clear(exchange);
	free(object->pinned);
	free(object);
	fetch->private = NULL;
	fetch_done(fetch);
}

void object_fetch(const struct object_ops *ops, struct fetch *fetch)
{
	struct mirror *mirror = fetch->mirror;
	struct object_fetch *object = calloc(1, sizeof(*object));

	if (object)
		object->exchange.url = ops->url(mirror);
	if (!object || !object->exchange.url) {
		free(object);
		fetch_failed(fetch, -ENOMEM, FETCH_TRANSIENT, "no memory for a request");
		return;
	}
	object->ops = ops;
	object->fetch = fetch;
	fetch->private = object;
	if (mirror->identity && ops->validator) {
		object->pinned = strdup(mirror->identity);
		if (object->pinned)
			object->exchange.if_range = ops->validator(object->pinned);
	}
	object->exchange.remote = mirror->private;
	object->exchange.fetcher = fetch->fetcher;
	object->exchange.wish = (struct answer_wish){
		.offset = fetch->offset,
		.length = fetch->length,
		.size = mirror->source->size,
	};
	object->exchange.data = fetch->data;
	object->exchange.deadline_ns = fetch->deadline_ns;
	object->exchange.fresh = fetch->fresh;
	object->exchange.progress = &fetch->progress;
	object->exchange.done = on_done;
	exchange_start(&object->exchange);
}

void object_cancel(struct fetch *fetch)
{
	struct object_fetch *object = fetch->private;

	if (object)
		exchange_cancel(&object->exchange);
}

/* A range of one byte, not HEAD: signed URLs are for GET, and only that shows that ranges work. */
int object_probe(const struct object_ops *ops, struct mirror *mirror, uint32_t timeout_ms,
		 struct mirror_probe *probe, struct complaint *complaint)
{
	uint8_t byte;
	struct exchange exchange = {
		.remote = mirror->private,
		.url = ops->url(mirror),
		.wish = { .length = 1, .size = ANSWER_UNKNOWN },
		.data = &byte,
		.deadline_ns = clock_now_ns() + (uint64_t)timeout_ms * 1000000,
	};
	int err;

	if (!exchange.url)
		return complain(complaint, -ENOMEM, "no memory for a request");
	exchange_start(&exchange);
	err = exchange.result;
	if (err) {
		complaint_text(complaint, "%s", exchange.complaint.text);
		if (exchange.complaint.hint[0])
			complaint_hint(complaint, "%s", exchange.complaint.hint);
	} else if (exchange.answer.range_total == ANSWER_UNKNOWN) {
		err = complain(complaint, -EPROTO, "the server does not say the object's size");
	} else {
		probe->size = exchange.answer.range_total;
		probe->identity = ops->identity ? ops->identity(&exchange.answer) : NULL;
	}
	exchange_clear(&exchange);
	return err;
}
