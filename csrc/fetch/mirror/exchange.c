/* SPDX-License-Identifier: MIT */
#include "fetch/mirror/exchange.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fetch/fetcher_ops.h"
#include "fetch/inquiry.h"
#include "fetch/mirror/carrier_http1.h"

enum {
	REDIRECTS_MAX = 8,
	TEXT_FIRST_BYTES = 4 << 10,
};

enum next { NEXT_DONE, NEXT_AGAIN, NEXT_LOGIN };

static const char *first_url(const struct exchange *exchange)
{
	return exchange->login && exchange->login->url ? exchange->login->url : exchange->url;
}

/* The current URL, after redirects. */
static const char *current_url(const struct exchange *exchange)
{
	return exchange->location ? exchange->location : first_url(exchange);
}

/* Whether that has the origin of the first URL: credentials go nowhere else. */
static bool is_at_home(const struct exchange *exchange)
{
	return !exchange->location || url_same_origin(first_url(exchange), exchange->location);
}

static void fail(struct exchange *exchange, int err, enum fetch_failure failure, const char *why)
{
	char where[REMOTE_TEXT_BYTES];

	exchange->result = err;
	exchange->failure = failure;
	error_set_text(&exchange->error, "%s: %s",
		       url_text(exchange->asked ?: current_url(exchange), where), why);
}

static struct response_verdict judge(struct exchange *exchange)
{
	if (exchange->wanted.length)
		return response_judge(&exchange->response, &exchange->wanted, &exchange->reason);
	if (exchange->response.status == 200)
		return (struct response_verdict){};
	return response_judge_status(exchange->response.status, &exchange->reason);
}

static void note_progress(struct exchange *exchange)
{
	if (exchange->progress)
		++*exchange->progress;
}

static struct exchange *exchange_of(struct carriage *carriage)
{
	return container_of(carriage, struct exchange, carriage);
}

static void on_line(struct carriage *carriage, const char *line, size_t length)
{
	struct exchange *exchange = exchange_of(carriage);

	note_progress(exchange);
	response_line(&exchange->response, line, length);
}

/* Returns whether there is room for more text, and a NUL. */
static bool make_text_room(struct exchange *exchange)
{
	size_t room = exchange->text_room ? 2 * exchange->text_room : TEXT_FIRST_BYTES;
	char *longer;

	if (exchange->text_length < exchange->text_room)
		return true;
	if (room > INQUIRY_TEXT_MAX_BYTES) {
		exchange->too_long = true;
		return false;
	}
	/* Not realloc(), which would leave secrets in freed memory. */
	longer = calloc(1, room + 1);
	if (!longer)
		return false;
	if (exchange->text) {
		memcpy(longer, exchange->text, exchange->text_length);
		explicit_bzero(exchange->text, exchange->text_length);
	}
	free(exchange->text);
	exchange->text = longer;
	exchange->text_room = room;
	return true;
}

static bool is_all(const struct exchange *exchange)
{
	return response_is_all(&exchange->response, &exchange->wanted);
}

/* What comes behind that is thrown away. */
static bool has_enough(const struct exchange *exchange)
{
	return exchange->received == exchange->wanted.length &&
	       (exchange->wanted.begins || is_all(exchange));
}

/* Has what comes before the range overwrite itself. */
static int skip_space(struct exchange *exchange, struct iovec *parts, int room)
{
	uint64_t left = exchange->wanted.offset - exchange->skipped;
	int count = 0;

	if (!make_text_room(exchange))
		return 0;
	for (; count < room && left; count++) {
		parts[count].iov_base = exchange->text;
		parts[count].iov_len = left < exchange->text_room ? left : exchange->text_room;
		left -= parts[count].iov_len;
	}
	return count;
}

static bool is_skipping(const struct exchange *exchange)
{
	return exchange->skipped < exchange->wanted.offset && is_all(exchange);
}

static int text_space(struct exchange *exchange, struct iovec *parts)
{
	if (!make_text_room(exchange))
		return 0;
	parts->iov_base = exchange->text + exchange->text_length;
	parts->iov_len = exchange->text_room - exchange->text_length;
	return 1;
}

/* The beginning of what a refusal says, if it can be understood, and the rest is thrown away. */
static int refusal_space(struct exchange *exchange, struct iovec *parts)
{
	uint64_t length = exchange->response.content_length;

	if (!exchange->remote->ops->explain || exchange->response.status < 300 ||
	    exchange->text_length == TEXT_FIRST_BYTES ||
	    (length != RESPONSE_UNKNOWN && length > CARRIER_THROW_AWAY_BYTES))
		return CARRIER_UNWANTED;
	return text_space(exchange, parts) ?: CARRIER_UNWANTED;
}

static int on_space(struct carriage *carriage, struct iovec *parts, int room)
{
	struct exchange *exchange = exchange_of(carriage);

	note_progress(exchange);
	if (!exchange->judged) {
		exchange->verdict = judge(exchange);
		exchange->judged = true;
		if (!exchange->verdict.err && exchange->accepted)
			exchange->accepted(exchange);
	}
	if (exchange->verdict.err)
		return refusal_space(exchange, parts);
	if (!exchange->wanted.length)
		return text_space(exchange, parts);
	if (is_skipping(exchange))
		return skip_space(exchange, parts, room);
	if (has_enough(exchange))
		return CARRIER_UNWANTED;
	exchange->too_long = exchange->received == exchange->wanted.length;
	if (exchange->too_long)
		return 0;
	if (exchange->run)
		return exchange->run->sink->space(exchange->run, parts, room) ?: CARRIER_PAUSED;
	parts->iov_base = exchange->data + exchange->received;
	parts->iov_len = exchange->wanted.length - exchange->received;
	return 1;
}

static void on_take(struct carriage *carriage, size_t bytes)
{
	struct exchange *exchange = exchange_of(carriage);

	if (exchange->verdict.err || !exchange->wanted.length) {
		exchange->text_length += bytes;
		return;
	}
	if (is_skipping(exchange)) {
		exchange->skipped += bytes;
		return;
	}
	exchange->received += (uint32_t)bytes;
	if (exchange->run)
		exchange->run->sink->take(exchange->run, bytes);
}

static void on_over(struct carriage *carriage, CURLcode code);

static const struct carriage_ops carriage_ops = {
	.line = on_line,
	.space = on_space,
	.take = on_take,
	.over = on_over,
};

static void forget_asked(struct exchange *exchange)
{
	secret_free(exchange->asked);
	free(exchange->host);
	exchange->asked = exchange->host = NULL;
}

/* The same request, but that it goes to the cache. Returns 0 or -ENOMEM. */
static int ask_cache(struct exchange *exchange)
{
	const char *authority = strstr(current_url(exchange), "://") + 3;
	size_t length = strcspn(authority, "/?");

	forget_asked(exchange);
	if (!exchange->via || exchange->direct || !is_at_home(exchange))
		return 0;
	if (asprintf(&exchange->asked, "%s%s%s", exchange->via, authority[length] == '/' ? "" : "/",
		     authority + length) < 0)
		exchange->asked = NULL;
	exchange->host = strndup(authority, length);
	return exchange->asked && exchange->host ? 0 : -ENOMEM;
}

/* Prepares for a response. Returns 0 or a negative errno, with the response filled in. */
static int set_request(struct exchange *exchange)
{
	if (clock_now_ns() >= exchange->deadline_ns) {
		fail(exchange, -ETIMEDOUT, FETCH_TRANSIENT, "not done in time");
		return -ETIMEDOUT;
	}
	response_reset(&exchange->response);
	exchange->verdict = (struct response_verdict){};
	exchange->reason = (struct error){};
	exchange->judged = exchange->too_long = false;
	exchange->received = 0;
	exchange->skipped = 0;
	exchange_clear(exchange);
	free(exchange->carriage.redirect);
	exchange->carriage.redirect = NULL;
	if (ask_cache(exchange)) {
		fail(exchange, -ENOMEM, FETCH_TRANSIENT, "no memory for a request");
		return -ENOMEM;
	}
	exchange->carriage = (struct carriage){
		.ops = &carriage_ops,
		.remote = exchange->remote,
		.login = exchange->login,
		.url = exchange->asked ?: current_url(exchange),
		.origin = exchange->host,
		.if_range = exchange->if_range,
		.accept = exchange->accept,
		.referer = exchange->referer,
		.form = exchange->form,
		.offset = exchange->wanted.offset,
		.length = exchange->wanted.length,
		.deadline_ns = exchange->deadline_ns,
		.home = is_at_home(exchange),
		.fresh = exchange->fresh,
	};
	return 0;
}

static bool is_redirect(unsigned status)
{
	return status == 301 || status == 302 || status == 303 || status == 307 || status == 308;
}

static enum next wrong_redirect(struct exchange *exchange, int err, const char *why)
{
	fail(exchange, err, FETCH_WRONG, why);
	return NEXT_DONE;
}

/* A path alone, which libcurl takes for one of the cache, is one of the source. */
static int bring_home(struct exchange *exchange)
{
	const char *from = current_url(exchange);
	char *to = exchange->carriage.redirect, *path, *home;
	int length = (int)(strstr(from, "://") + 3 - from);

	if (!to || !exchange->asked || !url_same_origin(to, exchange->asked))
		return 0;
	path = strstr(to, "://") + 3;
	path += strcspn(path, "/?");
	length += (int)strcspn(from + length, "/?");
	if (asprintf(&home, "%.*s%s", length, from, path) < 0)
		return -ENOMEM;
	secret_free(to);
	exchange->carriage.redirect = home;
	return 0;
}

/* Adds to the reason what the server says itself. */
static const char *explain(struct exchange *exchange, struct error *whole)
{
	struct error said = {};

	if (exchange->text && exchange->remote->ops->explain)
		exchange->remote->ops->explain(exchange->text, &said);
	error_set_text(whole, "%s%s%s", exchange->reason.text, said.text[0] ? ", " : "", said.text);
	return whole->text;
}

/* Some stores want the registry as the referer. They get its origin, without a path. */
static int set_referer(struct exchange *exchange)
{
	const char *url = current_url(exchange), *authority = strstr(url, "://") + 3;

	free(exchange->referer);
	if (asprintf(&exchange->referer, "%.*s/", (int)(authority - url + strcspn(authority, "/?")),
		     url) >= 0)
		return 0;
	exchange->referer = NULL;
	return -ENOMEM;
}

static enum next follow(struct exchange *exchange)
{
	int err = bring_home(exchange);
	const char *to = exchange->carriage.redirect;
	struct error unused = {}, why = {};

	if (err) {
		fail(exchange, err, FETCH_TRANSIENT, "no memory for a request");
		return NEXT_DONE;
	}
	if (!to && exchange->text)
		return wrong_redirect(exchange, -EPROTO, explain(exchange, &why));
	if (!to)
		return wrong_redirect(exchange, -EPROTO, "redirects without saying where to");
	if (++exchange->redirects > REDIRECTS_MAX)
		return wrong_redirect(exchange, -ELOOP, "too many redirects");
	if (exchange->form)
		return wrong_redirect(exchange, -EPROTO, "redirects what was sent to it");
	if (url_check(to, "Location", &unused))
		return wrong_redirect(exchange, -EPROTO,
				      "redirects to what is no http or https URL, or has a user");
	if (url_is_https(current_url(exchange)) && !url_is_https(to))
		return wrong_redirect(exchange, -EPROTO, "redirects from https to http");
	if (set_referer(exchange)) {
		fail(exchange, -ENOMEM, FETCH_TRANSIENT, "no memory for a request");
		return NEXT_DONE;
	}
	free(exchange->location);
	exchange->location = exchange->carriage.redirect;
	exchange->carriage.redirect = NULL;
	return NEXT_AGAIN;
}

static enum fetch_failure failure_of(CURLcode code, int *err)
{
	*err = -EIO;
	switch (code) {
	case CURLE_OPERATION_TIMEDOUT:
		*err = -ETIMEDOUT;
		return FETCH_TRANSIENT;
	case CURLE_COULDNT_CONNECT:
	case CURLE_COULDNT_RESOLVE_HOST:
	case CURLE_COULDNT_RESOLVE_PROXY:
		*err = -EHOSTUNREACH;
		return FETCH_TRANSIENT;
	case CURLE_PEER_FAILED_VERIFICATION:
	case CURLE_SSL_CACERT_BADFILE:
	case CURLE_SSL_CERTPROBLEM:
	case CURLE_SSL_ISSUER_ERROR:
	case CURLE_LOGIN_DENIED:
		*err = -EACCES;
		return FETCH_DENIED;
	case CURLE_UNSUPPORTED_PROTOCOL:
	case CURLE_URL_MALFORMAT:
	case CURLE_WEIRD_SERVER_REPLY:
	case CURLE_BAD_CONTENT_ENCODING:
	case CURLE_WRITE_ERROR:
		*err = -EPROTO;
		return FETCH_WRONG;
	case CURLE_OUT_OF_MEMORY:
		*err = -ENOMEM;
		return FETCH_TRANSIENT;
	default:
		return FETCH_TRANSIENT;
	}
}

static void fail_transfer(struct exchange *exchange, CURLcode code)
{
	enum fetch_failure failure;
	int err;

	if (exchange->too_long) {
		fail(exchange, -EPROTO, FETCH_WRONG, "sends more than was asked for");
		return;
	}
	exchange->cut = true;
	exchange->code = code;
	exchange->verify = exchange->carriage.verify;
	failure = failure_of(code, &err);
	if (failure == FETCH_DENIED && exchange->login)
		login_distrust(exchange->remote, exchange->login);
	fail(exchange, err, failure,
	     exchange->carriage.text[0] ? exchange->carriage.text : curl_easy_strerror(code));
}

static void fail_verdict(struct exchange *exchange)
{
	uint32_t retry_after_s = exchange->response.retry_after_s;
	struct error why = {};

	if (retry_after_s && exchange->response.status == 503)
		exchange->verdict.failure = FETCH_BUSY;
	exchange->retry_after_ms = retry_after_s * 1000;
	fail(exchange, exchange->verdict.err, exchange->verdict.failure, explain(exchange, &why));
}

static bool wants_new_login(struct exchange *exchange)
{
	struct remote *remote = exchange->remote;

	if (exchange->own_login || exchange->renewed || !is_at_home(exchange) ||
	    !remote->ops->refused || !remote->ops->refused(remote, &exchange->response))
		return false;
	exchange->renewed = true;
	return true;
}

/*
 * Whether it has answered with everything to a date, which may be its own: Apache does so while a
 * file is young, Undertow whenever its clock has milliseconds. Without If-Range, the head of a
 * range says the date.
 */
static bool doubts_date(const struct exchange *exchange)
{
	return exchange->response.status == 200 && exchange->if_range && *exchange->if_range != '"';
}

/* To be called when a transfer is over. */
static enum next conclude(struct exchange *exchange, CURLcode code)
{
	/* on_space() has stopped it, for a reason that is more precise than libcurl's. */
	bool refused = exchange->judged && exchange->verdict.err;

	if (has_enough(exchange) || (code == CURLE_WRITE_ERROR && refused))
		code = CURLE_OK;
	if (code != CURLE_OK) {
		fail_transfer(exchange, code);
		return NEXT_DONE;
	}
	if (is_redirect(exchange->response.status))
		return follow(exchange);
	if (!exchange->judged)
		exchange->verdict = judge(exchange);
	if (exchange->verdict.err) {
		if (exchange->asked && exchange->verdict.failure == FETCH_DENIED) {
			exchange->direct = true;
			return NEXT_AGAIN;
		}
		if (wants_new_login(exchange))
			return NEXT_LOGIN;
		if (doubts_date(exchange)) {
			exchange->if_range = NULL;
			exchange->wanted.within_all = true;
			return NEXT_AGAIN;
		}
		fail_verdict(exchange);
		return NEXT_DONE;
	}
	if (exchange->received < exchange->wanted.length) {
		fail(exchange, -EIO, FETCH_TRANSIENT, "ends before all was sent");
		return NEXT_DONE;
	}
	exchange->result = 0;
	return NEXT_DONE;
}

static void give_login_back(struct exchange *exchange)
{
	if (exchange->login)
		login_put(exchange->remote, exchange->login);
	exchange->login = NULL;
}

static void finish(struct exchange *exchange)
{
	give_login_back(exchange);
	free(exchange->carriage.redirect);
	forget_asked(exchange);
	free(exchange->url);
	secret_free(exchange->form);
	free(exchange->location);
	free(exchange->referer);
	exchange->carriage.redirect = NULL;
	exchange->url = exchange->form = exchange->location = exchange->referer = NULL;
	exchange->done(exchange);
}

static void begin_with(struct exchange *exchange, const struct carrier *carrier)
{
	int err;

	if (!set_request(exchange)) {
		err = carrier->start(&exchange->carriage, exchange->fetcher);
		if (err == CARRIER_NOT_MINE && !exchange->fetcher->visited) {
			carrier = &carrier_curl;
			err = carrier->start(&exchange->carriage, exchange->fetcher);
		}
		if (!err) {
			exchange->carrier = carrier;
			return;
		}
		fail(exchange, -ENOMEM, FETCH_TRANSIENT, "no memory for a request");
	}
	finish(exchange);
}

bool exchange_can_send(struct remote *remote, const struct fetcher *fetcher, const char *url)
{
	bool due, can = false;
	struct login *login = login_current(remote, &due);

	if (login) {
		const struct carriage carriage = { .remote = remote,
						   .login = login,
						   .url = login->url ?: url,
						   .length = 1,
						   .home = true };

		can = !due && carrier_http1_can_send(&carriage, fetcher);
		login_put(remote, login);
	}
	return can;
}

/* Start again at the first URL: the login is for its host. */
static void forget_login(struct exchange *exchange)
{
	const char *token = login_token(exchange->login);

	/* NB: registries are asked without credentials first. */
	if (exchange->login->headers || exchange->login->send_user)
		login_is_refused(exchange->remote, token ? token_number(token) : 0);
	login_drop(exchange->remote, exchange->login);
	give_login_back(exchange);
	free(exchange->location);
	free(exchange->referer);
	exchange->location = exchange->referer = NULL;
	exchange->direct = false;
}

/*
 * NB: this knows nothing of a proxy by TLS that the environment names, nor of a token server by TLS of
 * a registry without it. For these, libcurl reads the certificates itself.
 */
static bool uses_tls(const struct exchange *exchange)
{
	const char *url = current_url(exchange), *proxy = exchange->remote->proxy;

	/* NB: a URL that is a secret comes with the login. */
	return !url || url_is_https(url) || (exchange->via && url_is_https(exchange->via)) ||
	       (proxy && url_is_https(proxy));
}

static void wait_for_login(struct exchange *exchange)
{
	if (uses_tls(exchange))
		login_want_trust(exchange->remote);
	login_wait(exchange);
}

static void begin(struct exchange *exchange)
{
	const struct login *login = exchange->login;

	if (exchange->own_login || login->trust_known || login->ca.text || !uses_tls(exchange)) {
		begin_with(exchange, &carrier_http1);
		return;
	}
	/* Nothing of it was used by TLS so far: it was redirected there. */
	login_drop(exchange->remote, exchange->login);
	give_login_back(exchange);
	wait_for_login(exchange);
}

static void find_login(struct exchange *exchange)
{
	bool due = false;

	if (!exchange->login)
		exchange->login = login_current(exchange->remote, &due);
	if (due && !exchange->keeps_remote)
		login_renew(exchange->remote, exchange->fetcher);
	if (exchange->login)
		begin(exchange);
	else
		wait_for_login(exchange);
}

static void on_over(struct carriage *carriage, CURLcode code)
{
	struct exchange *exchange = exchange_of(carriage);
	bool plain = exchange->carrier == &carrier_http1;
	enum next next;

	exchange->carrier = NULL;
	/* libcurl may understand the response, or says what is wrong with it. */
	if (plain && code == CURLE_WEIRD_SERVER_REPLY) {
		begin_with(exchange, &carrier_curl);
		return;
	}
	next = conclude(exchange, code);
	if (next == NEXT_DONE) {
		finish(exchange);
	} else if (next == NEXT_LOGIN) {
		forget_login(exchange);
		find_login(exchange);
	} else {
		begin(exchange);
	}
}

void exchange_login_ready(struct exchange *exchange, struct login *login)
{
	exchange->login = login;
	begin(exchange);
}

void exchange_login_failed(struct exchange *exchange, int err, enum fetch_failure failure,
			   const struct error *error)
{
	exchange->result = err;
	exchange->failure = failure;
	exchange->error = *error;
	finish(exchange);
}

void exchange_start(struct exchange *exchange)
{
	exchange->own_login = exchange->login != NULL;
	find_login(exchange);
}

void exchange_cancel(struct exchange *exchange)
{
	if (exchange->waiting)
		login_wait_no_more(exchange);
	else
		exchange->carrier->stop(&exchange->carriage);
	exchange->carrier = NULL;
	exchange->cut = true;
	fail(exchange, -ECANCELED, FETCH_TRANSIENT,
	     "given up, because nothing has arrived for a while");
	finish(exchange);
}

void exchange_resume(struct exchange *exchange)
{
	exchange->carrier->resume(&exchange->carriage);
}

void exchange_clear(struct exchange *exchange)
{
	if (exchange->text)
		explicit_bzero(exchange->text, exchange->text_length);
	free(exchange->text);
	exchange->text = NULL;
	exchange->text_length = exchange->text_room = 0;
}
