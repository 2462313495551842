/* SPDX-License-Identifier: MIT */
#include "fetch/transfer.h"

#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <time.h>
#include <uv.h>

#include "fetch/attachment.h"
#include "fetch/fetcher_ops.h"

enum {
	ALL_CONNECTIONS = 256,
	CONNECT_TIMEOUT_MS = 10000,
	/* A name that leads elsewhere is asked for as soon as changed credentials are read. */
	NAMES_S = 5,
	TEXT_BYTES = 320, /* a name of 253, a port */
	/* A connection on which nothing is acknowledged any more must not be reused. */
	UNACKNOWLEDGED_MS = TRANSFER_LOW_SPEED_S * 1000,
	/*
	 * Stacks of libcurl's resolver threads, which wait in getaddrinfo(3). The default of 8 MiB
	 * would be locked for each.
	 */
	RESOLVER_STACK_BYTES = LAZY_STACK_BYTES,
};

/* Each fetcher has one. */
struct transfers {
	struct attachment attachment;
	CURLM *multi;
	time_t latest; /* on the wall clock */
	struct fetcher *fetcher;
	uv_timer_t timer;
};

/* A socket that libcurl has asked us to watch. */
struct watch {
	uv_poll_t poll;
	struct transfers *transfers;
	curl_socket_t fd;
};

static void init_once(void)
{
	pthread_attr_t attributes;
	size_t stack_bytes = 0;

	curl_global_init(CURL_GLOBAL_DEFAULT);
	/* libcurl starts its threads with the default attributes and has no option for that. */
	if (pthread_getattr_default_np(&attributes))
		return;
	pthread_attr_getstacksize(&attributes, &stack_bytes);
	if (stack_bytes > RESOLVER_STACK_BYTES &&
	    !pthread_attr_setstacksize(&attributes, RESOLVER_STACK_BYTES))
		pthread_setattr_default_np(&attributes);
	pthread_attr_destroy(&attributes);
}

/* Opens a socket that processes which we start do not inherit. */
static curl_socket_t open_socket(void *owner, curlsocktype purpose, struct curl_sockaddr *address)
{
	const unsigned most_ms = UNACKNOWLEDGED_MS;
	curl_socket_t made;

	made = socket(address->family, address->socktype | SOCK_CLOEXEC, address->protocol);
	if (made >= 0)
		setsockopt(made, IPPROTO_TCP, TCP_USER_TIMEOUT, &most_ms, sizeof(most_ms));
	return made;
}

void transfer_init(void)
{
	static pthread_once_t once = PTHREAD_ONCE_INIT;

	pthread_once(&once, init_once);
}

CURL *transfer_easy(void)
{
	CURL *easy;

	transfer_init();
	easy = curl_easy_init();
	if (!easy)
		return NULL;
	curl_easy_setopt(easy, CURLOPT_NOSIGNAL, 1L);
	/*
	 * Otherwise a cancelled transfer waits for its thread in getaddrinfo(3), and so does the
	 * loop.
	 */
	curl_easy_setopt(easy, CURLOPT_QUICK_EXIT, 1L);
	curl_easy_setopt(easy, CURLOPT_PROTOCOLS_STR, "http,https");
	curl_easy_setopt(easy, CURLOPT_FOLLOWLOCATION, 0L);
	curl_easy_setopt(easy, CURLOPT_HTTP_VERSION, (long)CURL_HTTP_VERSION_2TLS);
	curl_easy_setopt(easy, CURLOPT_SUPPRESS_CONNECT_HEADERS, 1L);
	curl_easy_setopt(easy, CURLOPT_USERAGENT, TRANSFER_USER_AGENT);
	curl_easy_setopt(easy, CURLOPT_CONNECTTIMEOUT_MS, (long)CONNECT_TIMEOUT_MS);
	curl_easy_setopt(easy, CURLOPT_DNS_CACHE_TIMEOUT, (long)NAMES_S);
	curl_easy_setopt(easy, CURLOPT_LOW_SPEED_LIMIT, (long)TRANSFER_LOW_SPEED_BYTES_PER_S);
	curl_easy_setopt(easy, CURLOPT_LOW_SPEED_TIME, (long)TRANSFER_LOW_SPEED_S);
	curl_easy_setopt(easy, CURLOPT_TCP_KEEPALIVE, 1L);
	curl_easy_setopt(easy, CURLOPT_OPENSOCKETFUNCTION, open_socket);
	return easy;
}

/* To be called before the handle is removed, which closes its connection. */
static CURLcode keep_connection(struct transfer *transfer)
{
	curl_socket_t fd = CURL_SOCKET_BAD;

	curl_easy_getinfo(transfer->easy, CURLINFO_ACTIVESOCKET, &fd);
	if (fd != CURL_SOCKET_BAD)
		transfer->fd = fcntl(fd, F_DUPFD_CLOEXEC, 0);
	return transfer->fd < 0 ? CURLE_COULDNT_CONNECT : CURLE_OK;
}

/*
 * libcurl 7.88 keeps addresses by the wall clock: those that it has learnt before that was set
 * back would be kept for as long. Until then, it forgets a host's when a transfer begins.
 */
static void forget_address(struct transfers *transfers, struct transfer *transfer)
{
	time_t now = time(NULL);
	char *url = NULL, *host = NULL, *port = NULL, text[TEXT_BYTES];
	CURLU *parts;

	if (now >= transfers->latest) {
		transfers->latest = now;
		return;
	}
	parts = curl_url();
	curl_easy_getinfo(transfer->easy, CURLINFO_EFFECTIVE_URL, &url);
	if (parts && url && !curl_url_set(parts, CURLUPART_URL, url, 0) &&
	    !curl_url_get(parts, CURLUPART_HOST, &host, 0) &&
	    !curl_url_get(parts, CURLUPART_PORT, &port, CURLU_DEFAULT_PORT)) {
		snprintf(text, sizeof(text), "-%s:%s", host, port);
		transfer->forgotten = curl_slist_append(NULL, text);
		curl_easy_setopt(transfer->easy, CURLOPT_RESOLVE, transfer->forgotten);
	}
	curl_free(host);
	curl_free(port);
	curl_url_cleanup(parts);
}

static void leave(struct transfer *transfer)
{
	curl_multi_remove_handle(transfer->multi, transfer->easy);
	transfer->multi = NULL;
	curl_easy_setopt(transfer->easy, CURLOPT_RESOLVE, NULL);
	curl_slist_free_all(transfer->forgotten);
	transfer->forgotten = NULL;
}

static void finish_transfers(struct transfers *transfers)
{
	CURLMsg *message;
	int left;

	while ((message = curl_multi_info_read(transfers->multi, &left))) {
		struct transfer *transfer = NULL;
		CURLcode code;

		if (message->msg != CURLMSG_DONE)
			continue;
		code = message->data.result;
		curl_easy_getinfo(message->easy_handle, CURLINFO_PRIVATE, &transfer);
		if (transfer->connects && code == CURLE_OK)
			code = keep_connection(transfer);
		/* NB: this frees `message`. */
		leave(transfer);
		transfer->done(transfer, code);
	}
}

static void on_ready(uv_poll_t *poll, int status, int events)
{
	const struct watch *watch = poll->data;
	struct transfers *transfers = watch->transfers;
	int running, what = 0;

	fetcher_enter(transfers->fetcher);
	if (status < 0)
		what |= CURL_CSELECT_ERR;
	if (events & UV_READABLE)
		what |= CURL_CSELECT_IN;
	if (events & UV_WRITABLE)
		what |= CURL_CSELECT_OUT;
	/* NB: this may free `watch`. */
	curl_multi_socket_action(transfers->multi, watch->fd, what, &running);
	finish_transfers(transfers);
}

static void on_timer(uv_timer_t *timer)
{
	struct transfers *transfers = timer->data;
	int running;

	curl_multi_socket_action(transfers->multi, CURL_SOCKET_TIMEOUT, 0, &running);
	finish_transfers(transfers);
}

static void free_watch(uv_handle_t *poll)
{
	free(poll->data);
}

static int stop_watching(struct transfers *transfers, struct watch *watch)
{
	if (!watch)
		return 0;
	curl_multi_assign(transfers->multi, watch->fd, NULL);
	/* Stop now: libcurl closes the socket next, and its number may be reused. */
	uv_poll_stop(&watch->poll);
	uv_close((uv_handle_t *)&watch->poll, free_watch);
	return 0;
}

static struct watch *start_watching(struct transfers *transfers, curl_socket_t fd)
{
	struct watch *watch = calloc(1, sizeof(*watch));

	if (!watch)
		return NULL;
	if (uv_poll_init_socket(transfers->fetcher->loop, &watch->poll, fd)) {
		free(watch);
		return NULL;
	}
	watch->poll.data = watch;
	watch->transfers = transfers;
	watch->fd = fd;
	curl_multi_assign(transfers->multi, fd, watch);
	return watch;
}

static int on_socket(CURL *easy, curl_socket_t fd, int what, void *owner, void *watched)
{
	struct transfers *transfers = owner;
	struct watch *watch = watched;
	int events = 0;

	if (what == CURL_POLL_REMOVE)
		return stop_watching(transfers, watch);
	if (!watch)
		watch = start_watching(transfers, fd);
	if (!watch)
		return -1;
	if (what & CURL_POLL_IN)
		events |= UV_READABLE;
	if (what & CURL_POLL_OUT)
		events |= UV_WRITABLE;
	return uv_poll_start(&watch->poll, events, on_ready) ? -1 : 0;
}

static int on_timeout_change(CURLM *multi, long timeout_ms, void *owner)
{
	struct transfers *transfers = owner;

	if (timeout_ms < 0)
		return uv_timer_stop(&transfers->timer);
	/* Use the timer even for 0, because libcurl must not be entered from here. */
	return uv_timer_start(&transfers->timer, on_timer, (uint64_t)timeout_ms, 0) ? -1 : 0;
}

static void free_transfers(uv_handle_t *timer)
{
	free(timer->data);
}

static void close_transfers(struct attachment *attachment)
{
	struct transfers *transfers = container_of(attachment, struct transfers, attachment);

	curl_multi_cleanup(transfers->multi);
	uv_close((uv_handle_t *)&transfers->timer, free_transfers);
}

static void configure(struct transfers *transfers)
{
	CURLM *multi = transfers->multi;

	curl_multi_setopt(multi, CURLMOPT_SOCKETFUNCTION, on_socket);
	curl_multi_setopt(multi, CURLMOPT_SOCKETDATA, transfers);
	curl_multi_setopt(multi, CURLMOPT_TIMERFUNCTION, on_timeout_change);
	curl_multi_setopt(multi, CURLMOPT_TIMERDATA, transfers);
	curl_multi_setopt(multi, CURLMOPT_PIPELINING, (long)CURLPIPE_MULTIPLEX);
	curl_multi_setopt(multi, CURLMOPT_MAX_HOST_CONNECTIONS, (long)TRANSFER_HOST_CONNECTIONS);
	curl_multi_setopt(multi, CURLMOPT_MAX_TOTAL_CONNECTIONS, (long)ALL_CONNECTIONS);
	curl_multi_setopt(multi, CURLMOPT_MAXCONNECTS, (long)TRANSFER_IDLE_CONNECTIONS);
}

static int open_transfers(struct attachment *attachment, struct fetcher *fetcher)
{
	struct transfers *transfers = container_of(attachment, struct transfers, attachment);

	transfers->fetcher = fetcher;
	transfers->multi = curl_multi_init();
	if (!transfers->multi || uv_timer_init(fetcher->loop, &transfers->timer)) {
		curl_multi_cleanup(transfers->multi);
		return -ENOMEM;
	}
	transfers->timer.data = transfers;
	configure(transfers);
	return 0;
}

static const struct attachment_kind transfers_kind = { sizeof(struct transfers), open_transfers,
						       close_transfers };

int transfer_start(struct transfer *transfer, struct fetcher *fetcher)
{
	struct transfers *transfers = attachment_of(fetcher, &transfers_kind);

	if (!transfers)
		return -ENOMEM;
	transfer->fd = -1;
	transfer->forgotten = NULL;
	curl_easy_setopt(transfer->easy, CURLOPT_CONNECT_ONLY, transfer->connects ? 1L : 0L);
	curl_easy_setopt(transfer->easy, CURLOPT_PRIVATE, transfer);
	forget_address(transfers, transfer);
	transfer->multi = transfers->multi;
	if (curl_multi_add_handle(transfers->multi, transfer->easy)) {
		leave(transfer);
		return -ENOMEM;
	}
	return 0;
}

void transfer_stop(struct transfer *transfer)
{
	if (transfer->multi)
		leave(transfer);
}
