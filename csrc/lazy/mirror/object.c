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

static bool is_date(const char *identity)
{
	return !strncmp(identity, "modified ", 9);
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
 * A range need not repeat the date that If-Range has said (RFC 9110, 15.3.7); it would have to repeat a
 * strong ETag.
 */
static bool is_confirmed(const struct object_fetch *object)
{
	const struct exchange *exchange = &object->exchange;
	const struct answer *answer = &exchange->answer;

	return object->pinned && is_date(object->pinned) && !exchange->result &&
	       answer->range_total == exchange->wish.size && answer->etag[0] != '"' &&
	       !answer->last_modified[0];
}

/*
 * With If-Range, the answer to "it is another one" is all of that (200). One that names no object at all
 * may be of somebody on the way.
 */
static bool is_another(const struct object_fetch *object, const char *pinned, const char *identity)
{
	const struct exchange *exchange = &object->exchange;

	if (exchange->result && (exchange->answer.status != 200 || !identity))
		return false;
	if (is_confirmed(object))
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
	if (is_another(object, pinned, identity)) {
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
