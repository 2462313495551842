/* SPDX-License-Identifier: MIT */
#include "fetch/mirror/http1_pool.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "fetch/fetcher_ops.h"
#include "fetch/mirror/secret.h"

enum {
	/* As libcurl does: a router or proxy may have forgotten an older connection. */
	IDLE_MAX_S = 118,
};

static void close_all(struct attachment *attachment);

static int open_all(struct attachment *attachment, struct fetcher *fetcher)
{
	struct http1 *http1 = container_of(attachment, struct http1, attachment);

	http1->fetcher = fetcher;
	list_init(&http1->hosts);
	list_init(&http1->idle);
	return timer_queue_init(&http1->timers, fetcher->loop);
}

static const struct attachment_kind http1_kind = { sizeof(struct http1), open_all, close_all };

struct http1 *http1_pool_of(struct fetcher *fetcher)
{
	return attachment_of(fetcher, &http1_kind);
}

struct http1 *http1_pool_if_open(const struct fetcher *fetcher)
{
	return attachment_if_open(fetcher, &http1_kind);
}

static struct http1_host *make_host(struct http1 *http1, const struct http1_target *target)
{
	struct http1_host *host = calloc(1, sizeof(*host) + target->host_length);

	if (!host)
		return NULL;
	host->http1 = http1;
	list_init(&host->waiting);
	host->name_length = target->host_length;
	memcpy(host->name, target->host, target->host_length);
	list_append(&http1->hosts, &host->link);
	return host;
}

struct http1_host *http1_host_of(struct http1 *http1, const struct http1_target *target,
				 uint64_t now_ns)
{
	struct http1_host *found = NULL;

	for (struct link *link = http1->hosts.next; link != &http1->hosts;) {
		struct http1_host *host = container_of(link, struct http1_host, link);

		link = link->next;
		if (host->name_length == target->host_length &&
		    !memcmp(host->name, target->host, host->name_length)) {
			found = host;
		} else if (!host->connections && list_is_empty(&host->waiting) &&
			   host->refused_until_ns <= now_ns) {
			list_remove(&host->link);
			free(host);
		}
	}
	return found ?: make_host(http1, target);
}

static void free_connection(uv_handle_t *poll)
{
	free(container_of(poll, struct http1_connection, poll));
}

void http1_leave_idle(struct http1_connection *connection)
{
	list_remove(&connection->link);
	timer_clear(&connection->timer);
	connection->host->http1->idle_count--;
}

void http1_close(struct http1_connection *connection)
{
	if (link_is_in_list(&connection->link))
		http1_leave_idle(connection);
	timer_clear(&connection->timer);
	connection->host->connections--;
	secret_free(connection->unsent);
	free(connection->begun);
	free(connection->early);
	if (connection->fd < 0) {
		transfer_stop(&connection->connecting);
		curl_easy_cleanup(connection->connecting.easy);
		free(connection);
		return;
	}
	/* libuv forgets the descriptor here, before its number can be another one's. */
	uv_close((uv_handle_t *)&connection->poll, free_connection);
	close(connection->fd);
}

static void on_idle_for_long(struct timer *timer)
{
	http1_close(container_of(timer, struct http1_connection, timer));
}

void http1_keep_idle(struct http1 *http1, struct http1_connection *connection)
{
	if (http1->idle_count == TRANSFER_IDLE_CONNECTIONS)
		http1_close(container_of(http1->idle.next, struct http1_connection, link));
	http1->idle_count++;
	list_append(&http1->idle, &connection->link);
	connection->timer.expire = on_idle_for_long;
	timer_set(&http1->timers, &connection->timer, clock_now_ns() + IDLE_MAX_S * NS_PER_S);
}

struct http1_connection *http1_idle_of(const struct http1_host *host)
{
	const struct link *idle = &host->http1->idle;

	for (struct link *link = idle->previous; link != idle; link = link->previous) {
		struct http1_connection *connection =
			container_of(link, struct http1_connection, link);

		if (connection->host == host)
			return connection;
	}
	return NULL;
}

static void close_all(struct attachment *attachment)
{
	struct http1 *http1 = container_of(attachment, struct http1, attachment);
	struct link *link;

	while ((link = list_first(&http1->idle)))
		http1_close(container_of(link, struct http1_connection, link));
	while ((link = list_first(&http1->hosts))) {
		list_remove(link);
		free(container_of(link, struct http1_host, link));
	}
	timer_queue_deinit(&http1->timers);
	free(http1);
}
