/* SPDX-License-Identifier: MIT */
#include "fetch/mirror/carrier_http1.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>
#include <uv.h>

#include "fetch/fetcher_ops.h"
#include "fetch/mirror/http1_pool.h"

enum {
	/* How long libcurl makes all requests to a host whose responses are not plain. */
	REFUSED_S = 60,
	CONNECT_MAX_MS = 3600000,
	PARTS = 16,
};

/* What has become of a request. OVER: it has ended, perhaps with its connection, or pauses. */
enum progress { GOES_ON, OVER };

static void detach(struct carriage *carriage)
{
	timer_clear(&carriage->timer);
	list_remove(&carriage->waiting);
	if (carriage->connection)
		carriage->connection->carriage = NULL;
	carriage->connection = NULL;
}

static void serve_waiting(struct http1_host *host);

static void say(struct carriage *carriage, const char *format, ...)
	__attribute__((format(printf, 2, 3)));

static void say(struct carriage *carriage, const char *format, ...)
{
	va_list args;

	va_start(args, format);
	vsnprintf(carriage->text, sizeof(carriage->text), format, args);
	va_end(args);
}

/* Ends a request together with its connection. */
static void fail(struct http1_connection *connection, CURLcode code)
{
	struct carriage *carriage = connection->carriage;
	struct http1_host *host = connection->host;

	detach(carriage);
	http1_close(connection);
	serve_waiting(host);
	carriage->ops->over(carriage, code);
}

/* libcurl shall have it, and all others to this host for some time. */
static void refuse(struct http1_connection *connection)
{
	connection->host->refused_until_ns = clock_now_ns() + REFUSED_S * NS_PER_S;
	fail(connection, CURLE_WEIRD_SERVER_REPLY);
}

static int connect_for(struct carriage *carriage);
static int send_request(struct http1_connection *connection);
static int watch(struct http1_connection *connection);
static void set_timer(struct carriage *carriage, uint64_t now_ns);

static void attach(struct http1_connection *connection, struct carriage *carriage)
{
	connection->carriage = carriage;
	connection->head = (struct http1_head){};
	connection->unwanted = connection->paused = false;
	connection->arrived = 0;
	carriage->connection = connection;
}

/* Gives up a kept connection that is dead, and makes a new one. Returns 0 or -ENOMEM. */
static int replace(struct http1_connection *connection)
{
	struct carriage *carriage = connection->carriage;

	connection->carriage = NULL;
	carriage->connection = NULL;
	carriage->fresh = true;
	http1_close(connection);
	return connect_for(carriage);
}

/*
 * Returns whether a kept connection has been closed, or has bytes that came before the request and
 * so cannot be its response. The loop may not have come to see that yet.
 */
static bool is_stale(const struct http1_connection *connection)
{
	char byte;
	ssize_t got = recv(connection->fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT);

	return got >= 0 || (errno != EAGAIN && errno != EINTR);
}

static void on_left(struct timer *timer);

/* Gives a kept connection a request. Returns 0 or -ENOMEM. */
static int reuse(struct http1_connection *connection, struct carriage *carriage)
{
	struct http1 *http1 = connection->host->http1;

	attach(connection, carriage);
	if (!http1->fetcher->visited)
		return is_stale(connection) || send_request(connection) ? replace(connection) : 0;
	if (send_request(connection) || connection->unsent) {
		connection->timer.expire = on_left;
		timer_set(&http1->timers, &connection->timer, 0);
	}
	return 0;
}

static struct carriage *first_waiting(const struct http1_host *host)
{
	struct link *first = list_first(&host->waiting);

	return first ? container_of(first, struct carriage, waiting) : NULL;
}

/* Begins a request that has waited. Without memory for that, it goes on waiting. */
static void begin_waiting(struct carriage *carriage, struct http1_connection *connection)
{
	list_remove(&carriage->waiting);
	set_timer(carriage, clock_now_ns());
	if (connection ? reuse(connection, carriage) : connect_for(carriage))
		list_insert_after(&carriage->host->waiting, &carriage->waiting);
}

/* Has a request make a connection, where there is room for one. */
static void serve_waiting(struct http1_host *host)
{
	struct carriage *next = first_waiting(host);

	if (next && host->connections < TRANSFER_HOST_CONNECTIONS)
		begin_waiting(next, NULL);
}

/* The connection can have another request. */
static void release(struct http1_connection *connection)
{
	struct http1_host *host = connection->host;
	struct carriage *next = first_waiting(host);

	connection->used = true;
	if (next && !next->fresh) {
		begin_waiting(next, connection);
	} else if (next) {
		http1_close(connection);
		serve_waiting(host);
	} else {
		http1_keep_idle(host->http1, connection);
	}
}

static enum progress finish(struct http1_connection *connection)
{
	struct carriage *carriage = connection->carriage;

	/* What has an answer before it was sent is no good for a next request. */
	if (connection->head.close || connection->unsent) {
		fail(connection, CURLE_OK);
		return OVER;
	}
	detach(carriage);
	release(connection);
	carriage->ops->over(carriage, CURLE_OK);
	return OVER;
}

static bool looks_like_http1(const struct http1_connection *connection)
{
	static const char begin[] = "HTTP/1.1 ";
	size_t bytes = connection->begun_bytes;

	return !memcmp(connection->begun, begin,
		       bytes < sizeof(begin) - 1 ? bytes : sizeof(begin) - 1);
}

/* The connection has ended, with an errno or without (0). */
static enum progress broken(struct http1_connection *connection, int err)
{
	struct carriage *carriage = connection->carriage;
	bool answered = connection->begun || connection->head.length;

	if (connection->used && !answered) {
		if (replace(connection)) {
			detach(carriage);
			carriage->ops->over(carriage, CURLE_OUT_OF_MEMORY);
		}
	} else if (err) {
		say(carriage, "connection failed: %s", strerror(err));
		fail(connection, CURLE_RECV_ERROR);
	} else if (!answered) {
		fail(connection, CURLE_GOT_NOTHING);
	} else if (connection->head.length) {
		say(carriage, "transfer closed with %llu bytes remaining to read",
		    (unsigned long long)connection->left);
		fail(connection, CURLE_PARTIAL_FILE);
	} else if (looks_like_http1(connection)) {
		say(carriage, "transfer closed within the head of the response");
		fail(connection, CURLE_RECV_ERROR);
	} else {
		refuse(connection);
	}
	return OVER;
}

static int watch(struct http1_connection *connection);

/* What find_space() returns where there are no parts: the request is over, or pauses. */
enum { NO_CONNECTION = -1, NO_SPACE = 0 };

/* Asks where the next bytes belong. Returns how many parts there are, or one of the above. */
static int find_space(struct http1_connection *connection, struct iovec *parts, int room)
{
	struct carriage *carriage = connection->carriage;
	int count = carriage->ops->space(carriage, parts, room);

	if (count > 0)
		return count;
	if (count == CARRIER_UNWANTED && connection->left <= CARRIER_THROW_AWAY_BYTES) {
		connection->unwanted = true;
		parts[0].iov_base = connection->host->http1->head;
		parts[0].iov_len = HTTP1_HEAD_MAX_BYTES;
		return 1;
	}
	connection->paused = count == CARRIER_PAUSED;
	if (connection->paused && !watch(connection))
		return NO_SPACE;
	fail(connection, CURLE_WRITE_ERROR);
	return NO_CONNECTION;
}

static void took(struct http1_connection *connection, size_t bytes)
{
	connection->left -= bytes;
	connection->arrived += bytes;
	if (!connection->unwanted)
		connection->carriage->ops->take(connection->carriage, bytes);
}

/* Keeps what has come already until there is a place for it. */
static void keep_early(struct http1_connection *connection, const char *data, size_t bytes)
{
	connection->early = malloc(bytes);
	if (!connection->early) {
		fail(connection, CURLE_OUT_OF_MEMORY);
		return;
	}
	memcpy(connection->early, data, bytes);
	connection->early_bytes = bytes;
}

/* Takes the part of the body that has come together with the head. */
static enum progress take_first(struct http1_connection *connection, const char *data, size_t bytes)
{
	while (bytes) {
		struct iovec part;
		size_t length = bytes;

		switch (find_space(connection, &part, 1)) {
		case NO_SPACE:
			keep_early(connection, data, bytes);
			return OVER;
		case NO_CONNECTION:
			return OVER;
		}
		if (length > part.iov_len)
			length = part.iov_len;
		if (!connection->unwanted)
			memcpy(part.iov_base, data, length);
		took(connection, length);
		data += length;
		bytes -= length;
	}
	return connection->left ? GOES_ON : finish(connection);
}

static enum progress receive_body(struct http1_connection *connection)
{
	struct iovec parts[PARTS];
	struct msghdr message = { .msg_iov = parts };
	uint64_t most = 0;
	ssize_t got;
	int count = find_space(connection, parts, PARTS);

	if (count <= 0)
		return OVER;
	for (; message.msg_iovlen < (size_t)count && most < connection->left;
	     message.msg_iovlen++) {
		struct iovec *part = &parts[message.msg_iovlen];

		if (part->iov_len > connection->left - most)
			part->iov_len = connection->left - most;
		most += part->iov_len;
	}
	got = recvmsg(connection->fd, &message, 0);
	if (got < 0 && (errno == EAGAIN || errno == EINTR))
		return GOES_ON;
	if (got <= 0)
		return broken(connection, got ? errno : 0);
	took(connection, (size_t)got);
	return connection->left ? GOES_ON : finish(connection);
}

static void pass_lines(struct carriage *carriage, const char *head, size_t length)
{
	while (length) {
		const char *end = memchr(head, '\n', length);
		size_t line = (size_t)(end + 1 - head);

		carriage->ops->line(carriage, head, line);
		head += line;
		length -= line;
	}
}

/* Keeps the beginning of a head until there is more of it. */
static enum progress keep_begun(struct http1_connection *connection, size_t bytes)
{
	if (!connection->begun) {
		connection->begun = malloc(HTTP1_HEAD_MAX_BYTES);
		if (!connection->begun) {
			fail(connection, CURLE_OUT_OF_MEMORY);
			return OVER;
		}
		memcpy(connection->begun, connection->host->http1->head, bytes);
	}
	connection->begun_bytes = bytes;
	return GOES_ON;
}

static bool is_redirect(unsigned status)
{
	return status >= 300 && status < 400;
}

static enum progress take_head(struct http1_connection *connection, char *text, size_t bytes)
{
	struct http1_head head;
	int found = http1_head_parse(text, bytes, &head);
	enum progress progress;
	char *begun;

	if (!found)
		return keep_begun(connection, bytes);
	if (found < 0 || is_redirect(head.status) || bytes - head.length > head.content_length) {
		refuse(connection);
		return OVER;
	}
	connection->head = head;
	connection->left = head.content_length;
	begun = connection->begun;
	connection->begun = NULL;
	pass_lines(connection->carriage, text, head.length);
	progress = take_first(connection, text + head.length, bytes - head.length);
	free(begun);
	/* A full buffer means that there is more. */
	if (progress == GOES_ON && bytes == HTTP1_HEAD_MAX_BYTES)
		return receive_body(connection);
	return progress;
}

static enum progress receive_head(struct http1_connection *connection)
{
	char *text = connection->begun ?: connection->host->http1->head;
	size_t had = connection->begun ? connection->begun_bytes : 0;
	ssize_t got = recv(connection->fd, text + had, HTTP1_HEAD_MAX_BYTES - had, 0);

	if (got < 0 && (errno == EAGAIN || errno == EINTR))
		return GOES_ON;
	if (got <= 0)
		return broken(connection, got ? errno : 0);
	connection->arrived += (uint64_t)got;
	return take_head(connection, text, had + (size_t)got);
}

static enum progress receive(struct http1_connection *connection)
{
	return connection->head.length ? receive_body(connection) : receive_head(connection);
}

/* The connection was reset; what has arrived before is still there. */
static void receive_rest(struct http1_connection *connection)
{
	uint64_t arrived;

	do {
		arrived = connection->arrived;
		if (receive(connection) == OVER)
			return;
	} while (connection->arrived != arrived);
	broken(connection, ECONNRESET);
}

/* Returns 0 or a negative errno, when the connection is dead. */
static int send_rest(struct http1_connection *connection);

static void on_ready(uv_poll_t *poll, int status, int events)
{
	struct http1_connection *connection = container_of(poll, struct http1_connection, poll);

	fetcher_enter(connection->host->http1->fetcher);
	/* The server has closed it, or has sent what nobody asked for. */
	if (!connection->carriage) {
		http1_close(connection);
		return;
	}
	if (status < 0) {
		receive_rest(connection);
		return;
	}
	if ((events & UV_WRITABLE) && send_rest(connection)) {
		broken(connection, EPIPE);
		return;
	}
	if (events & UV_READABLE)
		receive(connection);
}

static int watch(struct http1_connection *connection)
{
	int events = (connection->paused ? 0 : UV_READABLE) |
		     (connection->unsent ? UV_WRITABLE : 0);

	if (!events)
		return uv_poll_stop(&connection->poll);
	return uv_poll_start(&connection->poll, events, on_ready);
}

/* Returns how many bytes were sent, or a negative errno when the connection is dead. */
static ssize_t send_some(int fd, const char *data, size_t bytes)
{
	ssize_t sent = send(fd, data, bytes, MSG_NOSIGNAL);

	if (sent >= 0)
		return sent;
	return errno == EAGAIN || errno == EINTR ? 0 : -errno;
}

static int send_rest(struct http1_connection *connection)
{
	ssize_t sent = send_some(connection->fd, connection->unsent + connection->unsent_at,
				 connection->unsent_bytes - connection->unsent_at);

	if (sent < 0)
		return (int)sent;
	connection->unsent_at += (size_t)sent;
	if (connection->unsent_at < connection->unsent_bytes)
		return 0;
	explicit_bzero(connection->unsent, connection->unsent_bytes);
	free(connection->unsent);
	connection->unsent = NULL;
	return watch(connection);
}

static int keep_unsent(struct http1_connection *connection, const char *text, size_t bytes)
{
	connection->unsent = malloc(bytes);
	if (!connection->unsent)
		return -ENOMEM;
	memcpy(connection->unsent, text, bytes);
	connection->unsent_bytes = bytes;
	connection->unsent_at = 0;
	return connection->host->http1->fetcher->visited ? 0 : watch(connection);
}

/* The loop's thread goes on with what a reader's could not send. */
static void on_left(struct timer *timer)
{
	struct http1_connection *connection = container_of(timer, struct http1_connection, timer);

	if (!connection->unsent || watch(connection))
		broken(connection, EPIPE);
}

static int send_request(struct http1_connection *connection)
{
	const struct carriage *carriage = connection->carriage;
	char text[HTTP1_REQUEST_MAX_BYTES];
	struct http1_target target;
	ssize_t sent = -EINVAL;
	size_t bytes = 0;

	if (http1_request_is_plain(carriage, &target))
		bytes = http1_request_write(carriage, &target, text);
	if (bytes)
		sent = send_some(connection->fd, text, bytes);
	if (sent >= 0 && (size_t)sent < bytes)
		sent = keep_unsent(connection, text + sent, bytes - (size_t)sent);
	/* It may have a token. */
	explicit_bzero(text, bytes);
	return sent < 0 ? (int)sent : 0;
}

static void on_connected(struct transfer *transfer, CURLcode code)
{
	struct http1_connection *connection =
		container_of(transfer, struct http1_connection, connecting);
	struct fetcher *fetcher = connection->host->http1->fetcher;

	if (code == CURLE_OK &&
	    uv_poll_init_socket(fetcher->loop, &connection->poll, transfer->fd)) {
		close(transfer->fd);
		code = CURLE_OUT_OF_MEMORY;
	}
	if (code != CURLE_OK) {
		fail(connection, code);
		return;
	}
	connection->fd = transfer->fd;
	curl_easy_cleanup(transfer->easy);
	transfer->easy = NULL;
	connection->carriage->text[0] = 0;
	set_timer(connection->carriage, clock_now_ns());
	if (watch(connection) || send_request(connection))
		broken(connection, EPIPE);
}

/* Returns NULL when there is no memory. */
static struct http1_connection *make_connection(struct carriage *carriage)
{
	struct http1_connection *connection = calloc(1, sizeof(*connection));
	uint64_t now_ns = clock_now_ns(), left_ms = 1;
	CURL *easy;

	if (!connection)
		return NULL;
	easy = transfer_easy();
	if (!easy) {
		free(connection);
		return NULL;
	}
	if (carriage->deadline_ns > now_ns)
		left_ms = (carriage->deadline_ns - now_ns) / NS_PER_MS + 1;
	curl_easy_setopt(easy, CURLOPT_TIMEOUT_MS,
			 (long)(left_ms < CONNECT_MAX_MS ? left_ms : CONNECT_MAX_MS));
	curl_easy_setopt(easy, CURLOPT_URL, carriage->url);
	curl_easy_setopt(easy, CURLOPT_PATH_AS_IS, 1L);
	curl_easy_setopt(easy, CURLOPT_PROXY, "");
	curl_easy_setopt(easy, CURLOPT_FRESH_CONNECT, 1L);
	curl_easy_setopt(easy, CURLOPT_ERRORBUFFER, carriage->text);
	connection->host = carriage->host;
	connection->fd = -1;
	connection->connecting.easy = easy;
	connection->connecting.connects = true;
	connection->connecting.done = on_connected;
	return connection;
}

/* Connects, perhaps when another request to the host is over. Returns 0 or -ENOMEM. */
static int connect_for(struct carriage *carriage)
{
	struct http1_host *host = carriage->host;
	struct http1_connection *connection;

	if (host->connections >= TRANSFER_HOST_CONNECTIONS) {
		connection = http1_idle_of(host);
		if (!connection) {
			list_append(&host->waiting, &carriage->waiting);
			return 0;
		}
		http1_close(connection);
	}
	connection = make_connection(carriage);
	if (!connection)
		return -ENOMEM;
	if (transfer_start(&connection->connecting, host->http1->fetcher)) {
		curl_easy_cleanup(connection->connecting.easy);
		free(connection);
		return -ENOMEM;
	}
	host->connections++;
	attach(connection, carriage);
	return 0;
}

static void give_up(struct carriage *carriage, const char *why)
{
	say(carriage, "%s", why);
	if (carriage->connection) {
		fail(carriage->connection, CURLE_OPERATION_TIMEDOUT);
		return;
	}
	detach(carriage);
	carriage->ops->over(carriage, CURLE_OPERATION_TIMEDOUT);
}

/* To be called again when a request is sent later: the time before does not count. */
static void set_timer(struct carriage *carriage, uint64_t now_ns)
{
	uint64_t at_ns = now_ns + TRANSFER_LOW_SPEED_S * NS_PER_S;

	timer_set(&carriage->host->http1->timers, &carriage->timer,
		  at_ns < carriage->deadline_ns ? at_ns : carriage->deadline_ns);
}

static bool is_slow(struct http1_connection *connection)
{
	uint64_t arrived = connection->arrived;

	connection->arrived = 0;
	return connection->fd >= 0 && !connection->paused &&
	       arrived < TRANSFER_LOW_SPEED_BYTES_PER_S * TRANSFER_LOW_SPEED_S;
}

static void on_timer(struct timer *timer)
{
	struct carriage *carriage = container_of(timer, struct carriage, timer);
	uint64_t now_ns = clock_now_ns();

	if (now_ns >= carriage->deadline_ns)
		give_up(carriage, "not done in time");
	else if (carriage->connection && is_slow(carriage->connection))
		give_up(carriage, "too slow: less than 1 KiB/s for 15 s");
	else
		set_timer(carriage, now_ns);
}

static int http1_start(struct carriage *carriage, struct fetcher *fetcher)
{
	uint64_t now_ns = clock_now_ns();
	struct http1_connection *connection;
	struct http1_target target;
	struct http1 *http1;
	int err;

	if (!http1_request_is_plain(carriage, &target))
		return CARRIER_NOT_MINE;
	http1 = http1_pool_of(fetcher);
	carriage->host = http1 ? http1_host_of(http1, &target, now_ns) : NULL;
	if (!carriage->host)
		return -ENOMEM;
	if (carriage->host->refused_until_ns > now_ns)
		return CARRIER_NOT_MINE;
	carriage->timer.expire = on_timer;
	set_timer(carriage, now_ns);
	connection = carriage->fresh ? NULL : http1_idle_of(carriage->host);
	if (connection)
		http1_leave_idle(connection);
	err = connection ? reuse(connection, carriage) : connect_for(carriage);
	if (err)
		detach(carriage);
	return err;
}

bool carrier_http1_can_send(const struct carriage *carriage, const struct fetcher *fetcher)
{
	uint64_t now_ns = clock_now_ns();
	struct http1 *http1 = http1_pool_if_open(fetcher);
	const struct http1_connection *idle;
	const struct http1_host *host;
	struct http1_target target;

	if (!http1 || !http1_request_is_plain(carriage, &target))
		return false;
	host = http1_host_of(http1, &target, now_ns);
	if (!host || host->refused_until_ns > now_ns)
		return false;
	idle = http1_idle_of(host);
	return idle && !is_stale(idle);
}

static void http1_stop(struct carriage *carriage)
{
	struct http1_connection *connection = carriage->connection;
	struct http1_host *host = carriage->host;

	detach(carriage);
	if (!connection)
		return;
	http1_close(connection);
	serve_waiting(host);
}

static void http1_resume(struct carriage *carriage)
{
	struct http1_connection *connection = carriage->connection;
	char *early = connection->early;

	connection->paused = false;
	connection->early = NULL;
	set_timer(carriage, clock_now_ns());
	if (watch(connection))
		broken(connection, EIO);
	else if (early)
		take_first(connection, early, connection->early_bytes);
	free(early);
}

const struct carrier carrier_http1 = { .start = http1_start,
				       .stop = http1_stop,
				       .resume = http1_resume };
