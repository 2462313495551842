/* SPDX-License-Identifier: MIT */
#include "lazy/mirror/exchange.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "lazy/fetcher.h"

enum {
	REDIRECTS_MAX = 8,
	TEXT_MAX_BYTES = 256 << 10,
	/* How much of an unwanted body is read, which is cheaper than a new connection. */
	THROW_AWAY_BYTES = 64 << 10,
	/* NB: the deadline may be UINT64_MAX, which means never. */
	TIMEOUT_MAX_MS = 3600000,
};

enum next { NEXT_DONE, NEXT_AGAIN, NEXT_LOGIN };

static void fail(struct exchange *exchange, int err, enum fetch_failure failure, const char *why)
{
	char where[REMOTE_TEXT_BYTES];

	exchange->result = err;
	exchange->failure = failure;
	error_set_text(&exchange->error, "%s: %s", url_text(exchange_url(exchange), where), why);
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

static size_t on_header(char *line, size_t size, size_t count, void *owner)
{
	struct exchange *exchange = owner;

	note_progress(exchange);
	response_line(&exchange->response, line, size * count);
	return size * count;
}

static size_t take_text(struct exchange *exchange, const char *data, size_t bytes)
{
	size_t length = exchange->text_length + bytes;
	char *longer;

	if (length > TEXT_MAX_BYTES) {
		exchange->too_long = true;
		return 0;
	}
	/* Not realloc(), which would leave secrets in freed memory. */
	longer = malloc(length + 1);
	if (!longer)
		return 0;
	if (exchange->text) {
		memcpy(longer, exchange->text, exchange->text_length);
		explicit_bzero(exchange->text, exchange->text_length);
	}
	memcpy(longer + exchange->text_length, data, bytes);
	longer[length] = 0;
	free(exchange->text);
	exchange->text = longer;
	exchange->text_length = length;
	return bytes;
}

static size_t on_body(char *data, size_t size, size_t count, void *owner)
{
	struct exchange *exchange = owner;
	size_t bytes = size * count;

	note_progress(exchange);
	if (!exchange->judged) {
		exchange->verdict = judge(exchange);
		exchange->judged = true;
	}
	if (exchange->verdict.err) {
		exchange->thrown_away += bytes;
		return exchange->thrown_away > THROW_AWAY_BYTES ? 0 : bytes;
	}
	if (!exchange->wanted.length)
		return take_text(exchange, data, bytes);
	if (bytes > exchange->wanted.length - exchange->received) {
		exchange->too_long = true;
		return 0;
	}
	memcpy(exchange->data + exchange->received, data, bytes);
	exchange->received += (uint32_t)bytes;
	return bytes;
}

/* Returns 0 or a negative errno, with the response filled in. */
static int make_easy(struct exchange *exchange)
{
	uint64_t now_ns = clock_now_ns();
	uint64_t left_ms;
	CURL *easy;

	if (now_ns >= exchange->deadline_ns) {
		fail(exchange, -ETIMEDOUT, FETCH_TRANSIENT, "not done in time");
		return -ETIMEDOUT;
	}
	left_ms = (exchange->deadline_ns - now_ns) / 1000000 + 1;
	easy = transfer_easy();
	exchange->transfer.easy = easy;
	if (!easy) {
		fail(exchange, -ENOMEM, FETCH_TRANSIENT, "no memory for a transfer");
		return -ENOMEM;
	}
	response_reset(&exchange->response);
	exchange->verdict = (struct response_verdict){};
	exchange->reason = (struct error){};
	exchange->judged = exchange->too_long = false;
	exchange->received = 0;
	exchange->thrown_away = 0;
	exchange->curl_text[0] = 0;
	exchange_clear(exchange);
	curl_easy_setopt(easy, CURLOPT_ERRORBUFFER, exchange->curl_text);
	curl_easy_setopt(easy, CURLOPT_HEADERFUNCTION, on_header);
	curl_easy_setopt(easy, CURLOPT_HEADERDATA, exchange);
	curl_easy_setopt(easy, CURLOPT_WRITEFUNCTION, on_body);
	curl_easy_setopt(easy, CURLOPT_WRITEDATA, exchange);
	curl_easy_setopt(easy, CURLOPT_TIMEOUT_MS,
			 (long)(left_ms < TIMEOUT_MAX_MS ? left_ms : TIMEOUT_MAX_MS));
	if (exchange_set_request(exchange, easy)) {
		fail(exchange, -ENOMEM, FETCH_TRANSIENT, "no memory for a request");
		return -ENOMEM;
	}
	return 0;
}

static void free_easy(struct exchange *exchange)
{
	struct curl_slist *header = exchange->headers;

	curl_easy_cleanup(exchange->transfer.easy);
	exchange->transfer.easy = NULL;
	for (; header; header = header->next)
		explicit_bzero(header->data, strlen(header->data));
	curl_slist_free_all(exchange->headers);
	exchange->headers = NULL;
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

static enum next follow(struct exchange *exchange)
{
	struct error unused = {};
	char *to = NULL;

	curl_easy_getinfo(exchange->transfer.easy, CURLINFO_REDIRECT_URL, &to);
	if (!to)
		return wrong_redirect(exchange, -EPROTO, "redirects without saying where to");
	if (++exchange->redirects > REDIRECTS_MAX)
		return wrong_redirect(exchange, -ELOOP, "too many redirects");
	if (exchange->form)
		return wrong_redirect(exchange, -EPROTO, "redirects what was sent to it");
	if (url_check(to, "Location", &unused))
		return wrong_redirect(exchange, -EPROTO,
				      "redirects to what is no http or https URL, or has a user");
	if (url_is_https(exchange_url(exchange)) && !url_is_https(to))
		return wrong_redirect(exchange, -EPROTO, "redirects from https to http");
	to = strdup(to);
	if (!to) {
		fail(exchange, -ENOMEM, FETCH_TRANSIENT, "no memory for a redirect");
		return NEXT_DONE;
	}
	free(exchange->location);
	exchange->location = to;
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
	curl_easy_getinfo(exchange->transfer.easy, CURLINFO_SSL_VERIFYRESULT, &exchange->verify);
	failure = failure_of(code, &err);
	fail(exchange, err, failure,
	     exchange->curl_text[0] ? exchange->curl_text : curl_easy_strerror(code));
}

static void fail_verdict(struct exchange *exchange)
{
	curl_off_t retry_after_s = 0;

	curl_easy_getinfo(exchange->transfer.easy, CURLINFO_RETRY_AFTER, &retry_after_s);
	if (retry_after_s > 0) {
		if (exchange->response.status == 503)
			exchange->verdict.failure = FETCH_BUSY;
		/* Believe at most a day, in ms. */
		exchange->retry_after_ms =
			(uint32_t)(retry_after_s < 86400 ? retry_after_s : 86400) * 1000;
	}
	fail(exchange, exchange->verdict.err, exchange->verdict.failure, exchange->reason.text);
}

static bool wants_new_login(struct exchange *exchange)
{
	struct remote *remote = exchange->remote;

	if (exchange->own_login || exchange->renewed || !exchange_at_home(exchange) ||
	    !remote->ops->refused || !remote->ops->refused(remote, &exchange->response))
		return false;
	exchange->renewed = true;
	return true;
}

/* To be called when a transfer is over. */
static enum next conclude(struct exchange *exchange, CURLcode code)
{
	/* on_body() has stopped it, for a reason that is more precise than libcurl's. */
	bool refused = exchange->judged && exchange->verdict.err;

	if (code != CURLE_OK && !(code == CURLE_WRITE_ERROR && refused)) {
		fail_transfer(exchange, code);
		return NEXT_DONE;
	}
	if (is_redirect(exchange->response.status))
		return follow(exchange);
	if (!exchange->judged)
		exchange->verdict = judge(exchange);
	if (exchange->verdict.err) {
		if (wants_new_login(exchange))
			return NEXT_LOGIN;
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
	free_easy(exchange);
	give_login_back(exchange);
	free(exchange->url);
	secret_free(exchange->form);
	free(exchange->location);
	exchange->url = exchange->form = exchange->location = NULL;
	if (exchange->done)
		exchange->done(exchange);
}

static void on_transfer(struct transfer *transfer, CURLcode code);

static void begin(struct exchange *exchange)
{
	exchange->transfer.done = on_transfer;
	if (!make_easy(exchange)) {
		if (!transfer_start(&exchange->transfer, exchange->fetcher))
			return;
		fail(exchange, -ENOMEM, FETCH_TRANSIENT, "no memory for a transfer");
	}
	finish(exchange);
}

/* Start again at the first URL: the login is for its host. */
static void forget_login(struct exchange *exchange)
{
	login_drop(exchange->remote, exchange->login);
	give_login_back(exchange);
	free(exchange->location);
	exchange->location = NULL;
}

static void find_login(struct exchange *exchange)
{
	if (!exchange->login)
		exchange->login = login_current(exchange->remote);
	if (exchange->login)
		begin(exchange);
	else
		login_wait(exchange);
}

static void on_transfer(struct transfer *transfer, CURLcode code)
{
	struct exchange *exchange = container_of(transfer, struct exchange, transfer);
	enum next next = conclude(exchange, code);

	if (next == NEXT_DONE) {
		finish(exchange);
		return;
	}
	free_easy(exchange);
	if (next == NEXT_LOGIN) {
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

static int make_login(struct exchange *exchange)
{
	struct remote *remote = exchange->remote;
	struct exchange ask = { .remote = remote, .deadline_ns = exchange->deadline_ns };
	struct error error = {};
	struct login *login = NULL;
	int err = login_read(remote, &login, &error);

	if (!err && remote->ops->ask)
		err = remote->ops->ask(remote, login, &ask, &error);
	if (err > 0) {
		exchange_start(&ask);
		err = ask.result;
		if (err)
			error = ask.error;
		else
			err = remote->ops->answered(remote, login, ask.text, &error);
		exchange_clear(&ask);
	}
	if (err) {
		if (login)
			login_put(remote, login);
		exchange->result = err;
		exchange->failure = FETCH_DENIED;
		exchange->error = error;
		return err;
	}
	login_publish(remote, login);
	exchange->login = login;
	return 0;
}

static void run(struct exchange *exchange)
{
	enum next next = NEXT_LOGIN;

	while (next != NEXT_DONE) {
		if (next == NEXT_LOGIN && !exchange->login)
			exchange->login = login_current(exchange->remote);
		if ((!exchange->login && make_login(exchange)) || make_easy(exchange))
			break;
		next = conclude(exchange, curl_easy_perform(exchange->transfer.easy));
		if (next == NEXT_DONE)
			break;
		free_easy(exchange);
		if (next == NEXT_LOGIN)
			forget_login(exchange);
	}
	finish(exchange);
}

void exchange_start(struct exchange *exchange)
{
	exchange->own_login = exchange->login != NULL;
	if (exchange->fetcher)
		find_login(exchange);
	else
		run(exchange);
}

void exchange_cancel(struct exchange *exchange)
{
	if (exchange->waiting)
		login_wait_no_more(exchange);
	else
		transfer_stop(&exchange->transfer);
	exchange->cut = true;
	fail(exchange, -ECANCELED, FETCH_TRANSIENT,
	     "given up, because nothing has arrived for a while");
	finish(exchange);
}

void exchange_clear(struct exchange *exchange)
{
	if (exchange->text)
		explicit_bzero(exchange->text, exchange->text_length);
	free(exchange->text);
	exchange->text = NULL;
	exchange->text_length = 0;
}
