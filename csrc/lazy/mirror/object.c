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
#include "lazy/mirror/hint.h"

/* W/"..." promises equivalent content, not identical bytes (RFC 9110, 8.8.1). */
char *object_identity(const struct response *response)
{
	char *text = NULL;
	int length = 0;

	if (response->etag[0] == '"')
		length = asprintf(&text, "etag %s", response->etag);
	else if (response->last_modified[0])
		length = asprintf(&text, "modified %s", response->last_modified);
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
	char *pinned; /* the identity that was sent as If-Range */
};

static void report(const struct exchange *exchange, struct fetch *fetch)
{
	fetch->result = exchange->result;
	fetch->failure = exchange->failure;
	if (fetch->mirror->via && fetch->failure == FETCH_GONE)
		fetch->failure = FETCH_ABSENT;
	fetch->retry_after_ms = exchange->retry_after_ms;
	fetch->error = exchange->error;
	fetch->cut = exchange->cut;
}

/*
 * A range need not repeat the date of If-Range (RFC 9110, 15.3.7), but would have to repeat a
 * strong ETag.
 */
static bool is_confirmed(const struct object_fetch *object)
{
	const struct exchange *exchange = &object->exchange;
	const struct response *response = &exchange->response;

	return object->pinned && is_date(object->pinned) && !exchange->result &&
	       response->range_total == exchange->wanted.size && response->etag[0] != '"' &&
	       !response->last_modified[0];
}

/*
 * When If-Range does not match, the response is the whole object (200). One without any identity
 * may come from a proxy.
 */
static bool is_another(const struct object_fetch *object, const char *pinned, const char *identity)
{
	const struct exchange *exchange = &object->exchange;

	if (exchange->result && (exchange->response.status != 200 || !identity))
		return false;
	if (is_confirmed(object))
		return false;
	return pinned && (!identity || strcmp(pinned, identity) != 0);
}

static void say_changed(struct fetch *fetch, const char *pinned, const char *identity)
{
	fetch->error = (struct error){};
	fetch->failure = FETCH_CHANGED;
	fetch->result = error_set(&fetch->error, -ESTALE,
				  "the object has changed: it is '%s', and was '%s'",
				  identity ? identity : "(without identity)", pinned);
}

static void on_done(struct exchange *exchange)
{
	struct object_fetch *object = container_of(exchange, struct object_fetch, exchange);
	struct fetch *fetch = object->fetch;
	/* NB: it may have been pinned after the request was made. */
	const char *pinned = mirror_object(fetch->mirror)->identity;
	char *identity = NULL;

	if (object->ops->identity)
		identity = object->ops->identity(&exchange->response);
	report(exchange, fetch);
	if (is_another(object, pinned, identity)) {
		say_changed(fetch, pinned, identity);
	} else if (!exchange->result && !pinned && !fetch->mirror->via) {
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
	const char *pinned = mirror_object(mirror)->identity;
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
	if (pinned && ops->validator) {
		object->pinned = strdup(pinned);
		if (object->pinned)
			object->exchange.if_range = ops->validator(object->pinned);
	}
	object->exchange.remote = mirror->private;
	object->exchange.via = mirror->via;
	object->exchange.fetcher = fetch->fetcher;
	object->exchange.wanted = (struct wanted_range){
		.offset = fetch->offset,
		.length = fetch->length,
		.size = mirror->source->object_bytes,
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

void object_add_hint(const struct exchange *exchange, const char *kind, struct error *error)
{
	struct failed_request failed = {
		.kind = kind,
		.code = exchange->code,
		.verify = exchange->verify,
		.status = exchange->response.status,
		.empty = response_is_empty(&exchange->response),
	};
	const char *hint = hint_for_request(&failed);

	if (exchange->error.hint[0])
		error_set_hint(error, "%s", exchange->error.hint);
	else if (hint)
		error_set_hint(error, "%s", hint);
}

/*
 * Asks for a range of one byte instead of HEAD: signed URLs are for GET, and only that shows that
 * ranges work.
 */
int object_probe(const struct object_ops *ops, struct mirror *mirror, uint32_t timeout_ms,
		 struct mirror_probe *probe, struct error *error)
{
	uint8_t byte;
	struct exchange exchange = {
		.remote = mirror->private,
		.url = ops->url(mirror),
		.wanted = { .length = 1, .size = RESPONSE_UNKNOWN },
		.data = &byte,
		.deadline_ns = clock_now_ns() + (uint64_t)timeout_ms * 1000000,
	};
	int err;

	if (!exchange.url)
		return error_set(error, -ENOMEM, "no memory for a request");
	exchange_start(&exchange);
	err = exchange.result;
	if (err) {
		error_set_text(error, "%s", exchange.error.text);
		object_add_hint(&exchange, mirror->ops->name, error);
	} else if (exchange.response.range_total == RESPONSE_UNKNOWN) {
		error_set_hint(error, "give its \"size\"");
		err = error_set(error, -EPROTO, "the server does not say the object's size");
	} else {
		probe->size = exchange.response.range_total;
		probe->identity = ops->identity ? ops->identity(&exchange.response) : NULL;
	}
	exchange_clear(&exchange);
	return err;
}
