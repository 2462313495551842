/* SPDX-License-Identifier: MIT */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fetch/attachment.h"
#include "fetch/fetcher_ops.h"
#include "fetch/mirror/carrier.h"
#include "fetch/mirror/trust.h"

enum {
	/*
	 * Fits headers and a small unit. Each handle has such a buffer, and all memory is locked.
	 */
	HEADERS_BYTES = 4 << 10,
	RECEIVE_MAX_BYTES = HEADERS_BYTES + (64 << 10),
	/* NB: the deadline may be UINT64_MAX, which means never. */
	TIMEOUT_MAX_MS = 3600000,
	IDLE_MAX = 64,
	IDLE_S = 10,
};

/* A handle of libcurl, and what it was set up for. */
struct curl_handle {
	struct link link; /* of the idle ones */
	uint64_t idle_since_ns;
	CURL *easy;
	struct curl_slist *headers;
	uint64_t login; /* its number */
	char *url, *if_range;
	uint32_t length; /* of the range; 0: no range, and the handle is not kept */
	bool home;
};

/* Each fetcher has one. */
struct curl_handles {
	struct attachment attachment;
	struct link idle; /* the one last used first */
	unsigned idle_count;
	struct timer_queue timers;
	struct timer timer; /* frees those that have been idle for long */
};

static void free_handle(struct curl_handle *handle)
{
	curl_easy_cleanup(handle->easy);
	for (const struct curl_slist *header = handle->headers; header; header = header->next)
		explicit_bzero(header->data, strlen(header->data));
	curl_slist_free_all(handle->headers);
	secret_free(handle->url);
	free(handle->if_range);
	free(handle);
}

static void free_idle(struct curl_handles *handles, struct curl_handle *handle)
{
	list_remove(&handle->link);
	handles->idle_count--;
	free_handle(handle);
}

static struct curl_handle *last_idle(const struct curl_handles *handles)
{
	if (list_is_empty(&handles->idle))
		return NULL;
	return container_of(handles->idle.previous, struct curl_handle, link);
}

static void free_old(struct timer *timer)
{
	struct curl_handles *handles = container_of(timer, struct curl_handles, timer);
	uint64_t now_ns = clock_now_ns();
	struct curl_handle *last;

	while ((last = last_idle(handles))) {
		if (now_ns - last->idle_since_ns < IDLE_S * NS_PER_S) {
			timer_set(&handles->timers, timer, last->idle_since_ns + IDLE_S * NS_PER_S);
			return;
		}
		free_idle(handles, last);
	}
}

static void close_handles(struct attachment *attachment)
{
	struct curl_handles *handles = container_of(attachment, struct curl_handles, attachment);
	struct curl_handle *last;

	while ((last = last_idle(handles)))
		free_idle(handles, last);
	timer_queue_deinit(&handles->timers);
	free(handles);
}

static int open_handles(struct attachment *attachment, struct fetcher *fetcher)
{
	struct curl_handles *handles = container_of(attachment, struct curl_handles, attachment);

	list_init(&handles->idle);
	handles->timer.expire = free_old;
	return timer_queue_init(&handles->timers, fetcher->loop);
}

/* Returns NULL when there is no memory: nothing is kept then. */
static struct curl_handles *handles_of(struct fetcher *fetcher)
{
	static const struct attachment_kind kind = { sizeof(struct curl_handles), open_handles,
						     close_handles };

	return attachment_of(fetcher, &kind);
}

static bool same_text(const char *one, const char *other)
{
	return one == other || (one && other && !strcmp(one, other));
}

static bool fits(const struct curl_handle *handle, const struct carriage *carriage)
{
	return handle->login == carriage->login->number && handle->home == carriage->home &&
	       handle->length == carriage->length &&
	       same_text(handle->if_range, carriage->if_range) &&
	       !strcmp(handle->url, carriage->url);
}

static struct curl_handle *take_idle(struct curl_handles *handles, const struct carriage *carriage)
{
	if (!carriage->length || carriage->form || carriage->accept)
		return NULL;
	list_for_each (struct curl_handle, handle, &handles->idle, link) {
		if (!fits(handle, carriage))
			continue;
		list_remove(&handle->link);
		handles->idle_count--;
		return handle;
	}
	return NULL;
}

static void give_back(struct curl_handles *handles, const struct carriage *carriage)
{
	struct curl_handle *handle = carriage->handle;

	if (!handles || !carriage->length || carriage->form || carriage->accept) {
		free_handle(handle);
		return;
	}
	/* It may say something when its connection is closed. */
	curl_easy_setopt(handle->easy, CURLOPT_ERRORBUFFER, NULL);
	if (handles->idle_count == IDLE_MAX)
		free_idle(handles, last_idle(handles));
	handle->idle_since_ns = clock_now_ns();
	list_insert_after(&handles->idle, &handle->link);
	handles->idle_count++;
	if (!timer_is_set(&handles->timer))
		timer_set(&handles->timers, &handles->timer,
			  handle->idle_since_ns + IDLE_S * NS_PER_S);
}

static size_t on_header(char *line, size_t size, size_t count, void *owner)
{
	struct carriage *carriage = owner;

	carriage->ops->line(carriage, line, size * count);
	return size * count;
}

static size_t on_body(char *data, size_t size, size_t count, void *owner)
{
	struct carriage *carriage = owner;
	size_t bytes = size * count;
	size_t done = carriage->taken < bytes ? carriage->taken : bytes;

	carriage->taken -= done;
	while (done < bytes) {
		struct iovec part;
		int parts = carriage->ops->space(carriage, &part, 1);
		size_t length = bytes - done;

		if (parts == CARRIER_UNWANTED) {
			carriage->thrown_away += length;
			return carriage->thrown_away > CARRIER_THROW_AWAY_BYTES ? 0 : bytes;
		}
		if (parts == CARRIER_PAUSED) {
			carriage->taken = done;
			return CURL_WRITEFUNC_PAUSE;
		}
		if (!parts)
			return 0;
		if (length > part.iov_len)
			length = part.iov_len;
		memcpy(part.iov_base, data + done, length);
		carriage->ops->take(carriage, length);
		done += length;
	}
	return bytes;
}

static void set_blob(CURL *easy, CURLoption option, const struct secret *secret)
{
	struct curl_blob blob = { secret->text, secret->length, CURL_BLOB_NOCOPY };

	if (secret->text)
		curl_easy_setopt(easy, option, &blob);
}

static int add_header(struct curl_handle *handle, const char *header)
{
	struct curl_slist *longer = curl_slist_append(handle->headers, header);

	if (!longer)
		return -ENOMEM;
	handle->headers = longer;
	return 0;
}

static int set_headers(struct curl_handle *handle, const struct carriage *carriage)
{
	char text[300];
	int err = 0;

	/* NB: the signature of S3 covers it, as libcurl does. */
	if (carriage->origin) {
		snprintf(text, sizeof(text), "Host: %s", carriage->origin);
		err = add_header(handle, text);
	}
	if (!err && carriage->if_range) {
		snprintf(text, sizeof(text), "If-Range: %s", carriage->if_range);
		err = add_header(handle, text);
	}
	if (!err && carriage->accept) {
		snprintf(text, sizeof(text), "Accept: %s", carriage->accept);
		err = add_header(handle, text);
	}
	if (carriage->home) {
		const struct curl_slist *header = carriage->login->headers;

		for (; header && !err; header = header->next)
			err = add_header(handle, header->data);
	}
	curl_easy_setopt(handle->easy, CURLOPT_HTTPHEADER, handle->headers);
	return err;
}

static void set_login(CURL *easy, const struct carriage *carriage)
{
	const struct remote *remote = carriage->remote;
	const struct login *login = carriage->login;

	trust_set(login->trusted, easy);
	set_blob(easy, CURLOPT_CAINFO_BLOB, &login->ca);
	/* A proxy is for the way to the mirror, and a certificate for the mirror itself. */
	if (carriage->origin)
		curl_easy_setopt(easy, CURLOPT_PROXY, "");
	else if (remote->proxy)
		curl_easy_setopt(easy, CURLOPT_PROXY, remote->proxy);
	if (!carriage->home)
		return;
	if (!carriage->origin) {
		set_blob(easy, CURLOPT_SSLCERT_BLOB, &login->certificate);
		set_blob(easy, CURLOPT_SSLKEY_BLOB, &login->key);
	}
	if (remote->ops->prepare)
		remote->ops->prepare(remote, login, easy);
}

static void set_length(CURL *easy, uint32_t length)
{
	uint32_t receive_bytes = HEADERS_BYTES + length;

	if (receive_bytes > RECEIVE_MAX_BYTES)
		receive_bytes = RECEIVE_MAX_BYTES;
	curl_easy_setopt(easy, CURLOPT_BUFFERSIZE, (long)receive_bytes);
	/* Nothing is decoded, so a response with an encoding is refused. */
	curl_easy_setopt(easy, CURLOPT_ACCEPT_ENCODING, "identity");
	curl_easy_setopt(easy, CURLOPT_HTTP_CONTENT_DECODING, 0L);
}

/* Sets all that requests like this one have in common. Returns 0 or -ENOMEM. */
static int set_up(struct curl_handle *handle, const struct carriage *carriage)
{
	CURL *easy = handle->easy;

	curl_easy_setopt(easy, CURLOPT_HEADERFUNCTION, on_header);
	curl_easy_setopt(easy, CURLOPT_WRITEFUNCTION, on_body);
	curl_easy_setopt(easy, CURLOPT_URL, carriage->url);
	curl_easy_setopt(easy, CURLOPT_PATH_AS_IS, 1L);
	/*
	 * Wait whether the connection becomes HTTP/2 and can take one more stream; only TLS can
	 * tell.
	 */
	curl_easy_setopt(easy, CURLOPT_PIPEWAIT, url_is_https(carriage->url) ? 1L : 0L);
	curl_easy_setopt(easy, CURLOPT_REFERER, carriage->referer);
	if (carriage->form)
		curl_easy_setopt(easy, CURLOPT_POSTFIELDS, carriage->form);
	if (carriage->length)
		set_length(easy, carriage->length);
	set_login(easy, carriage);
	return set_headers(handle, carriage);
}

static struct curl_handle *make_handle(const struct carriage *carriage)
{
	struct curl_handle *handle = calloc(1, sizeof(*handle));

	if (!handle)
		return NULL;
	handle->easy = transfer_easy();
	handle->login = carriage->login->number;
	handle->url = strdup(carriage->url);
	handle->if_range = carriage->if_range ? strdup(carriage->if_range) : NULL;
	handle->length = carriage->length;
	handle->home = carriage->home;
	if (handle->easy && handle->url && !handle->if_range == !carriage->if_range &&
	    !set_up(handle, carriage))
		return handle;
	free_handle(handle);
	return NULL;
}

/* Sets what only this request has. */
static void set_request(CURL *easy, struct carriage *carriage)
{
	uint64_t now_ns = clock_now_ns(), left_ms = 0;
	char range[48];

	if (carriage->deadline_ns > now_ns)
		left_ms = (carriage->deadline_ns - now_ns) / NS_PER_MS;
	curl_easy_setopt(easy, CURLOPT_TIMEOUT_MS,
			 (long)(left_ms < TIMEOUT_MAX_MS ? left_ms + 1 : TIMEOUT_MAX_MS));
	curl_easy_setopt(easy, CURLOPT_FRESH_CONNECT, carriage->fresh ? 1L : 0L);
	curl_easy_setopt(easy, CURLOPT_ERRORBUFFER, carriage->text);
	curl_easy_setopt(easy, CURLOPT_HEADERDATA, carriage);
	curl_easy_setopt(easy, CURLOPT_WRITEDATA, carriage);
	if (!carriage->length)
		return;
	snprintf(range, sizeof(range), "%llu-%llu", (unsigned long long)carriage->offset,
		 (unsigned long long)carriage->offset + carriage->length - 1);
	curl_easy_setopt(easy, CURLOPT_RANGE, range);
}

/* Takes out of the handle what is asked for when a request is over. */
static CURLcode take_outcome(struct carriage *carriage, CURLcode code)
{
	CURL *easy = carriage->handle->easy;
	char *to = NULL;

	if (code != CURLE_OK) {
		curl_easy_getinfo(easy, CURLINFO_SSL_VERIFYRESULT, &carriage->verify);
		return code;
	}
	curl_easy_getinfo(easy, CURLINFO_REDIRECT_URL, &to);
	if (!to)
		return CURLE_OK;
	/* A fragment is not for servers (RFC 9110, 10.2.2). */
	carriage->redirect = strndup(to, strcspn(to, "#"));
	return carriage->redirect ? CURLE_OK : CURLE_OUT_OF_MEMORY;
}

static void on_transfer(struct transfer *transfer, CURLcode code)
{
	struct carriage *carriage = container_of(transfer, struct carriage, transfer);

	code = take_outcome(carriage, code);
	give_back(carriage->handles, carriage);
	carriage->ops->over(carriage, code);
}

static int curl_start(struct carriage *carriage, struct fetcher *fetcher)
{
	struct curl_handles *handles = handles_of(fetcher);
	struct curl_handle *handle = handles ? take_idle(handles, carriage) : NULL;

	if (!handle)
		handle = make_handle(carriage);
	if (!handle)
		return -ENOMEM;
	set_request(handle->easy, carriage);
	carriage->handles = handles;
	carriage->handle = handle;
	carriage->transfer.easy = handle->easy;
	carriage->transfer.done = on_transfer;
	if (!transfer_start(&carriage->transfer, fetcher))
		return 0;
	free_handle(handle);
	return -ENOMEM;
}

static void curl_stop(struct carriage *carriage)
{
	transfer_stop(&carriage->transfer);
	free_handle(carriage->handle);
}

static void curl_resume(struct carriage *carriage)
{
	CURLcode code = curl_easy_pause(carriage->handle->easy, CURLPAUSE_CONT);

	/* NB: of a transfer that has ended meanwhile, the outcome is still to come. */
	if (!code || code == CURLE_BAD_FUNCTION_ARGUMENT)
		return;
	/* What it has kept is lost, and what follows must not take its place. */
	transfer_stop(&carriage->transfer);
	on_transfer(&carriage->transfer, code);
}

const struct carrier carrier_curl = { .start = curl_start,
				      .stop = curl_stop,
				      .resume = curl_resume };
