/* SPDX-License-Identifier: MIT */
#include "fetch/mirror/object.h"

#include <errno.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/cleanup.h"
#include "base/utf8.h"
#include "fetch/inquiry.h"
#include "fetch/mirror/exchange.h"
#include "fetch/mirror/hint.h"

const struct object_front *object_front;

/* The fetch process's server takes no other. */
const char *object_identity(const struct response *response, char text[static IDENTITY_BYTES])
{
	bool tagged = response->etag[0] && text_is_plain(response->etag);
	bool dated = response->last_modified[0] && text_is_plain(response->last_modified);

	if (!tagged && !dated)
		return NULL;
	snprintf(text, IDENTITY_BYTES, "%s%s%s%s%s", tagged ? "etag " : "",
		 tagged ? response->etag : "", tagged && dated ? " " : "", dated ? "modified " : "",
		 dated ? response->last_modified : "");
	return text;
}

struct object_run {
	struct exchange exchange;
	const struct object_ops *ops;
	struct run *run;
	char if_range[IDENTITY_BYTES];
	bool dated;   /* If-Range was a date */
	bool another; /* the object has another identity */
};

static void report(const struct exchange *exchange, struct run *run)
{
	run->result = exchange->result;
	run->failure = exchange->failure;
	if (run->mirror->via && run->failure == FETCH_GONE)
		run->failure = FETCH_ABSENT;
	if (run->mirror->via && exchange->response.status == 425)
		run->failure = FETCH_LATER;
	run->retry_after_ms = exchange->retry_after_ms;
	run->error = exchange->error;
	run->cut = exchange->cut;
}

/*
 * A range need not repeat the date of If-Range (RFC 9110, 15.3.7), but would have to repeat a
 * strong ETag.
 */
static bool is_confirmed(const struct object_run *object)
{
	const struct exchange *exchange = &object->exchange;
	const struct response *response = &exchange->response;

	return object->dated && exchange->if_range && !exchange->result &&
	       response->range_total == exchange->wanted.size && response->etag[0] != '"' &&
	       !response->last_modified[0];
}

/*
 * When If-Range does not match, the response is the whole object (200). One without any identity
 * may come from a proxy.
 */
static bool is_another(const struct object_run *object, const char *pinned, const char *identity)
{
	const struct exchange *exchange = &object->exchange;

	if (exchange->result && (exchange->response.status != 200 || !identity))
		return false;
	if (is_confirmed(object))
		return false;
	return pinned && (!identity || !identity_is_same(pinned, identity));
}

static void say_changed(struct run *run, const char *pinned, const char *identity)
{
	run->error = (struct error){};
	run->failure = FETCH_CHANGED;
	run->result = error_set(&run->error, -ESTALE,
				"the object has changed: it is '%s', and was '%s'",
				identity ? identity : "(without identity)", pinned);
}

static const char *identity_of(const struct object_run *object, char text[static IDENTITY_BYTES])
{
	if (!object->ops->identity)
		return NULL;
	return object->ops->identity(&object->exchange.response, text);
}

/* Where the name is not that of the content, all of something may be an error page. */
static bool is_doubtful(const struct object_run *object, const char *pinned, const char *identity)
{
	const struct run *run = object->run;

	if (!run->whole || run->mirror->ops->immutable)
		return false;
	return pinned ? !identity : object->exchange.response.content_length == RESPONSE_UNKNOWN;
}

/* NB: what is taken is delivered at once, so another object has to be refused here. */
static void on_accepted(struct exchange *exchange)
{
	struct object_run *object = container_of(exchange, struct object_run, exchange);
	struct run *run = object->run;
	/* NB: it may have been pinned after the request was made. */
	const char *pinned = mirror_object(run->mirror)->identity;
	char text[IDENTITY_BYTES];
	const char *identity = identity_of(object, text);

	run->whole = response_is_all(&exchange->response, &exchange->wanted);
	if (is_doubtful(object, pinned, identity)) {
		exchange->verdict = response_refuse_all(&exchange->reason);
		return;
	}
	object->another = is_another(object, pinned, identity);
	if (object->dated && !exchange->if_range && !object->another)
		exchange->remote->doubts_dates = true;
	if (object->another) {
		exchange->verdict = (struct response_verdict){ -ESTALE, FETCH_CHANGED };
	} else if (run->sized && exchange->response.content_length == RESPONSE_UNKNOWN) {
		run->unsized = true;
		exchange->verdict = (struct response_verdict){ -EAGAIN, FETCH_TRANSIENT };
		error_set_text(&exchange->reason, "does not say how much it sends");
	} else if (!pinned && !run->mirror->via) {
		free(run->identity);
		run->identity = identity ? strdup(identity) : NULL;
	}
	if (run->widens && !exchange->verdict.err && run->whole &&
	    exchange->response.content_length == exchange->wanted.size) {
		exchange->wanted.offset = 0;
		exchange->wanted.length = (uint32_t)exchange->wanted.size;
		run->sink->widen(run);
	}
}

static void on_done(struct exchange *exchange)
{
	struct object_run *object = container_of(exchange, struct object_run, exchange);
	struct run *run = object->run;
	const char *pinned = mirror_object(run->mirror)->identity;
	char text[IDENTITY_BYTES];
	const char *identity = identity_of(object, text);

	report(exchange, run);
	if (object->another || (exchange->result && is_another(object, pinned, identity)))
		say_changed(run, pinned, identity);
	exchange_clear(exchange);
	free(object);
	run->private = NULL;
	run->sink->over(run);
}

/*
 * NB: nginx cuts what it is asked for into slices from the first byte of the object on where there
 * is If-Range, so a site cache would ask for that slice each time. Caches say what they have by
 * their identity. Nor does what has digests need more than that.
 */
static void set_condition(struct object_run *object)
{
	struct mirror *mirror = object->run->mirror;
	const struct remote *remote = mirror->private;
	const char *pinned = mirror_object(mirror)->identity;
	enum condition condition;

	if (!pinned || !object->ops->conditional || mirror->via || mirror->source->has_digests)
		return;
	condition = identity_condition(pinned, object->if_range);
	object->dated = condition == CONDITION_DATE && !remote->doubts_dates;
	if (object->dated || condition == CONDITION_ETAG)
		object->exchange.if_range = object->if_range;
}

void object_start(struct run *run)
{
	struct mirror *mirror = run->mirror;
	const struct object_ops *ops = mirror->ops->object;
	struct object_run *object;

	if (object_front) {
		object_front->start(run);
		return;
	}
	object = calloc(1, sizeof(*object));
	if (object)
		object->exchange.url = ops->url(mirror);
	if (!object || !object->exchange.url) {
		free(object);
		run_lacks_memory(run);
		return;
	}
	object->ops = ops;
	object->run = run;
	run->private = object;
	set_condition(object);
	object->exchange.remote = mirror->private;
	object->exchange.via = mirror->via;
	object->exchange.fetcher = run->fetcher;
	object->exchange.wanted = (struct wanted_range){
		.offset = run->offset,
		.length = run->length,
		.size = mirror->source->object_bytes,
		/*
		 * So a proxy answers until it has stored the object; but to a date, others do so
		 * for no reason.
		 */
		.within_all = !object->dated && !mirror->via,
	};
	object->exchange.run = run;
	object->exchange.accepted = on_accepted;
	object->exchange.deadline_ns = run->deadline_ns;
	object->exchange.fresh = run->fresh;
	object->exchange.progress = &run->progress;
	object->exchange.done = on_done;
	exchange_start(&object->exchange);
}

bool object_ready(const struct run *run)
{
	char *url;
	bool ready;

	if (object_front)
		return object_front->ready(run);
	if (run->fresh || run->mirror->via)
		return false;
	url = run->mirror->ops->object->url(run->mirror);
	ready = url && exchange_can_send(run->mirror->private, run->fetcher, url);
	secret_free(url);
	return ready;
}

void object_cancel(struct run *run)
{
	struct object_run *object = run->private;

	if (object_front)
		object_front->cancel(run);
	else if (object)
		exchange_cancel(&object->exchange);
}

void object_resume(struct run *run)
{
	struct object_run *object = run->private;

	if (object_front)
		object_front->resume(run);
	else
		exchange_resume(&object->exchange);
}

void inquiry_failed(struct inquiry *inquiry, int err, const char *format, ...)
{
	char text[sizeof(inquiry->error.text)];
	va_list args;

	va_start(args, format);
	vsnprintf(text, sizeof(text), format, args);
	va_end(args);
	error_set_text(&inquiry->error, "%s", text);
	inquiry->result = err;
	inquiry->done(inquiry);
}

struct object_inquiry {
	struct exchange exchange;
	const struct object_ops *ops;
	struct inquiry *inquiry;
	uint8_t byte;
};

static void add_hint(const struct object_inquiry *object, struct error *error)
{
	const struct inquiry *inquiry = object->inquiry;
	const struct exchange *exchange = &object->exchange;
	const struct failed_request failed = {
		.kind = inquiry->name ? object->ops->document_kind : inquiry->mirror->ops->name,
		.code = exchange->code,
		.verify = exchange->verify,
		.status = exchange->response.status,
		.coded = exchange->response.encoding[0],
	};
	const char *hint = hint_for_request(&failed);

	if (exchange->error.hint[0])
		error_set_hint(error, "%s", exchange->error.hint);
	else if (hint)
		error_set_hint(error, "%s", hint);
}

static void take_answer(const struct object_inquiry *object)
{
	const struct exchange *exchange = &object->exchange;
	struct inquiry *inquiry = object->inquiry;

	if (response_is_empty(&exchange->response))
		return;
	if (response_size(&exchange->response) == RESPONSE_UNKNOWN) {
		error_set_hint(&inquiry->error, "give its \"size\"");
		inquiry->result = error_set(&inquiry->error, -EPROTO,
					    "the server does not say the object's size");
		return;
	}
	inquiry->found.size = response_size(&exchange->response);
	if (object->ops->identity) {
		char text[IDENTITY_BYTES];
		const char *identity = object->ops->identity(&exchange->response, text);

		inquiry->found.identity = identity ? strdup(identity) : NULL;
	}
}

/*
 * A range of nothing may be refused without a word of the size. NB: koa-range announces its first
 * byte (206), and sends none.
 */
static bool has_no_first_byte(const struct object_inquiry *object)
{
	const struct exchange *exchange = &object->exchange;
	unsigned status = exchange->response.status;

	return exchange->result && exchange->result != -ECANCELED && !object->inquiry->name &&
	       (status == 416 || status == 400 || status == 206) &&
	       exchange->response.range_total == RESPONSE_UNKNOWN;
}

/* NB: s3rver announces a byte of an empty object, and sends none. */
static bool is_answered(const struct object_inquiry *object)
{
	const struct exchange *exchange = &object->exchange;

	if (object->inquiry->name || !exchange->response.complete || exchange->result == -ECANCELED)
		return !exchange->result;
	return !exchange->result || response_is_empty(&exchange->response);
}

static void set_exchange(struct object_inquiry *object, void (*done)(struct exchange *exchange))
{
	const struct inquiry *inquiry = object->inquiry;
	struct mirror *mirror = inquiry->mirror;

	object->exchange = (struct exchange){
		.url = inquiry->name ? object->ops->document_url(mirror, inquiry->name) :
				       object->ops->url(mirror),
		.remote = mirror->private,
		.fetcher = inquiry->fetcher,
		.deadline_ns = inquiry->deadline_ns,
		.keeps_remote = true,
		.done = done,
	};
}

static void end_inquiry(struct object_inquiry *object)
{
	struct inquiry *inquiry = object->inquiry;

	exchange_clear(&object->exchange);
	free(object);
	inquiry->done(inquiry);
}

static void on_all(struct exchange *exchange)
{
	struct object_inquiry *object = container_of(exchange, struct object_inquiry, exchange);

	if (!exchange->result && !exchange->text_length) {
		object->inquiry->result = 0;
		object->inquiry->error = (struct error){};
	}
	end_inquiry(object);
}

/* Asks without a range whether there is anything; else the first answer counts. */
static void ask_for_all(struct object_inquiry *object)
{
	exchange_clear(&object->exchange);
	set_exchange(object, on_all);
	if (object->exchange.url)
		exchange_start(&object->exchange);
	else
		end_inquiry(object);
}

static void on_inquired(struct exchange *exchange)
{
	struct object_inquiry *object = container_of(exchange, struct object_inquiry, exchange);
	struct inquiry *inquiry = object->inquiry;

	inquiry->result = is_answered(object) ? 0 : exchange->result;
	if (inquiry->result) {
		error_set_text(&inquiry->error, "%s", exchange->error.text);
		add_hint(object, &inquiry->error);
	} else if (inquiry->name) {
		inquiry->text = exchange->text;
		exchange->text = NULL;
	} else {
		take_answer(object);
	}
	if (has_no_first_byte(object))
		ask_for_all(object);
	else
		end_inquiry(object);
}

/*
 * Asks for a range of one byte instead of HEAD: signed URLs are for GET, and only that shows that
 * ranges work, which an object needs that is not read as a whole. Some take its end, 0, for none, and
 * send everything. One byte of that is taken.
 */
void object_inquire(struct inquiry *inquiry)
{
	const struct object_ops *ops = inquiry->mirror->ops->object;
	struct object_inquiry *object;

	if (inquiry->name && !ops->is_document(inquiry->name)) {
		inquiry_failed(inquiry, -EINVAL, "'%s' is neither a tag nor a digest",
			       inquiry->name);
		return;
	}
	if (object_front) {
		object_front->inquire(inquiry);
		return;
	}
	object = calloc(1, sizeof(*object));
	if (object) {
		object->ops = ops;
		object->inquiry = inquiry;
		set_exchange(object, on_inquired);
	}
	if (!object || !object->exchange.url) {
		free(object);
		inquiry_failed(inquiry, -ENOMEM, "no memory for a request");
		return;
	}
	if (inquiry->name) {
		object->exchange.accept = ops->document_types;
	} else {
		object->exchange.wanted = (struct wanted_range){
			.length = 1,
			.size = RESPONSE_UNKNOWN,
			.begins = true,
			.within_all = true,
		};
		object->exchange.data = &object->byte;
	}
	exchange_start(&object->exchange);
}
