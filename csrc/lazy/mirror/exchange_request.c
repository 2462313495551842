/* SPDX-License-Identifier: MIT */
/* The requests of an exchange: their URL, headers and credentials. */

#include <errno.h>
#include <stdio.h>

#include "lazy/mirror/exchange.h"
#include "lazy/mirror/trust.h"

enum {
	/*
	 * Fits headers and a small unit. Each transfer has such a buffer, and all memory is locked.
	 */
	HEADERS_BYTES = 4 << 10,
	RECEIVE_MAX_BYTES = HEADERS_BYTES + (64 << 10),
};

static const char *first_url(const struct exchange *exchange)
{
	return exchange->login && exchange->login->url ? exchange->login->url : exchange->url;
}

const char *exchange_url(const struct exchange *exchange)
{
	return exchange->location ? exchange->location : first_url(exchange);
}

bool exchange_at_home(const struct exchange *exchange)
{
	return !exchange->location || url_same_origin(first_url(exchange), exchange->location);
}

static void set_blob(CURL *easy, CURLoption option, const struct secret *secret)
{
	struct curl_blob blob = { secret->text, secret->length, CURL_BLOB_NOCOPY };

	if (secret->text)
		curl_easy_setopt(easy, option, &blob);
}

static int add_header(struct exchange *exchange, const char *header)
{
	struct curl_slist *longer = curl_slist_append(exchange->headers, header);

	if (!longer)
		return -ENOMEM;
	exchange->headers = longer;
	return 0;
}

static int set_headers(struct exchange *exchange, CURL *easy)
{
	char text[300];
	int err = 0;

	if (exchange->if_range) {
		snprintf(text, sizeof(text), "If-Range: %s", exchange->if_range);
		err = add_header(exchange, text);
	}
	if (!err && exchange->accept) {
		snprintf(text, sizeof(text), "Accept: %s", exchange->accept);
		err = add_header(exchange, text);
	}
	if (exchange_at_home(exchange)) {
		const struct curl_slist *header = exchange->login->headers;

		for (; header && !err; header = header->next)
			err = add_header(exchange, header->data);
	}
	curl_easy_setopt(easy, CURLOPT_HTTPHEADER, exchange->headers);
	return err;
}

static void set_login(const struct exchange *exchange, CURL *easy)
{
	const struct remote *remote = exchange->remote;
	const struct login *login = exchange->login;

	trust_set(login->trusted, easy);
	set_blob(easy, CURLOPT_CAINFO_BLOB, &login->ca);
	if (remote->proxy)
		curl_easy_setopt(easy, CURLOPT_PROXY, remote->proxy);
	if (!exchange_at_home(exchange))
		return;
	set_blob(easy, CURLOPT_SSLCERT_BLOB, &login->certificate);
	set_blob(easy, CURLOPT_SSLKEY_BLOB, &login->key);
	if (remote->ops->prepare)
		remote->ops->prepare(remote, login, easy);
}

static void set_range(struct exchange *exchange, CURL *easy)
{
	const struct wanted_range *wanted = &exchange->wanted;
	uint32_t receive_bytes = HEADERS_BYTES + wanted->length;
	char range[48];

	if (exchange->form)
		curl_easy_setopt(easy, CURLOPT_POSTFIELDS, exchange->form);
	if (!wanted->length)
		return;
	if (receive_bytes > RECEIVE_MAX_BYTES)
		receive_bytes = RECEIVE_MAX_BYTES;
	curl_easy_setopt(easy, CURLOPT_BUFFERSIZE, (long)receive_bytes);
	snprintf(range, sizeof(range), "%llu-%llu", (unsigned long long)wanted->offset,
		 (unsigned long long)wanted->offset + wanted->length - 1);
	curl_easy_setopt(easy, CURLOPT_RANGE, range);
	/* Nothing is decoded, so a response with an encoding is refused. */
	curl_easy_setopt(easy, CURLOPT_ACCEPT_ENCODING, "identity");
	curl_easy_setopt(easy, CURLOPT_HTTP_CONTENT_DECODING, 0L);
}

int exchange_set_request(struct exchange *exchange, CURL *easy)
{
	const char *url = exchange_url(exchange);

	curl_easy_setopt(easy, CURLOPT_URL, url);
	curl_easy_setopt(easy, CURLOPT_PATH_AS_IS, 1L);
	/*
	 * Wait whether the connection becomes HTTP/2 and can take one more stream; only TLS can
	 * tell.
	 */
	curl_easy_setopt(easy, CURLOPT_PIPEWAIT, url_is_https(url) ? 1L : 0L);
	curl_easy_setopt(easy, CURLOPT_FRESH_CONNECT, exchange->fresh ? 1L : 0L);
	set_range(exchange, easy);
	set_login(exchange, easy);
	return set_headers(exchange, easy);
}
