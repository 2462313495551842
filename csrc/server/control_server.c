/* SPDX-License-Identifier: MIT */
#include "server/control_server.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/message.h"

enum {
	/* When there are too many clients, one that was silent for so long is disconnected. */
	SILENT_MS = 10 * 1000,
	ACCEPT_PAUSE_MS = 1000, /* after a failure that may pass, such as EMFILE */
};

static void drop(struct control_client *client)
{
	control_deinit(&client->connection);
}

int control_server_init(struct control_server *server, int fd)
{
	int listening = 0;
	socklen_t bytes = sizeof(listening);

	*server = (struct control_server){ .fd = fd };
	for (unsigned i = 0; i < CONTROL_CLIENTS; i++)
		server->clients[i].connection.fd = -1;
	if (fd < 0)
		return 0;
	if (getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listening, &bytes))
		return -errno;
	if (!listening)
		return -EINVAL;
	/*
	 * NB: this is a property of the socket, which other processes may share: one of them may
	 * accept the client that poll(2) has shown.
	 */
	return fcntl(fd, F_SETFL, O_NONBLOCK) ? -errno : 0;
}

void control_server_deinit(struct control_server *server)
{
	for (unsigned i = 0; i < CONTROL_CLIENTS; i++) {
		if (server->clients[i].connection.fd >= 0)
			drop(&server->clients[i]);
	}
}

/* Returns a free place, or that of the client that was silent longest; NULL: all are busy. */
static struct control_client *find_place(struct control_server *server, uint64_t now)
{
	struct control_client *oldest = server->clients;

	for (unsigned i = 0; i < CONTROL_CLIENTS; i++) {
		struct control_client *client = &server->clients[i];

		if (client->connection.fd < 0)
			return client;
		/* A client that waits for our answer is not silent. */
		if (oldest->connection.job ||
		    (client->last_ms < oldest->last_ms && !client->connection.job))
			oldest = client;
	}
	if (oldest->connection.job || now - oldest->last_ms < SILENT_MS)
		return NULL;
	drop(oldest);
	return oldest;
}

static bool is_allowed(int fd)
{
	struct ucred peer;
	socklen_t bytes = sizeof(peer);

	if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &bytes))
		return false;
	return peer.uid == 0 || peer.uid == geteuid();
}

static void refuse(int fd, const char *why)
{
	struct control_connection connection;

	control_init(&connection, fd, NULL, 0);
	control_send(&connection, control_error(why));
	control_deinit(&connection);
}

static void take_client(struct control_server *server, int fd)
{
	struct control_client *place;
	uint64_t now = clock_now_ms();
	char text[80];

	if (!is_allowed(fd)) {
		snprintf(text, sizeof(text), "only root and user %u may ask this server",
			 (unsigned)geteuid());
		refuse(fd, text);
		return;
	}
	place = find_place(server, now);
	if (!place) {
		/* NB: device/control.py recognizes this text, and tries again. */
		snprintf(text, sizeof(text), "all %d places for clients are taken; try again later",
			 CONTROL_CLIENTS);
		refuse(fd, text);
		return;
	}
	place->last_ms = now;
	control_init(&place->connection, fd, server->pool, CONTROL_CLIENT_WAIT_MS);
}

/* Accepts one client at a time, so that many new ones do not delay the others. */
static void accept_client(struct control_server *server)
{
	int fd = accept4(server->fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);

	if (fd >= 0) {
		take_client(server, fd);
		return;
	}
	if (errno == EAGAIN || errno == EINTR || errno == ECONNABORTED)
		return;
	msg_warning("cannot accept a control client: %s", strerror(errno));
	server->accept_again_ms = clock_now_ms() + ACCEPT_PAUSE_MS;
}

int control_server_prepare(struct control_server *server,
			   struct pollfd fds[static CONTROL_POLL_FDS])
{
	bool paused = server->accept_again_ms && clock_now_ms() < server->accept_again_ms;
	int wait_ms = paused ? ACCEPT_PAUSE_MS : -1;

	fds[0] = (struct pollfd){ .fd = paused ? -1 : server->fd, .events = POLLIN };
	for (unsigned i = 0; i < CONTROL_CLIENTS; i++) {
		struct control_connection *connection = &server->clients[i].connection;

		fds[1 + i] = (struct pollfd){
			.fd = connection->fd,
			.events = control_events(connection, &wait_ms),
		};
	}
	return wait_ms;
}

/* Requests of a client that is gone are carried out all the same. */
static enum control_action settle(struct control_client *client, enum control_action action)
{
	if (action == CONTROL_GONE || client->connection.broken)
		drop(client);
	return action == CONTROL_GONE ? CONTROL_GO_ON : action;
}

enum control_action control_server_finish(struct control_server *server,
					  const struct control_subject *subject,
					  const struct control_job *job)
{
	for (unsigned i = 0; i < CONTROL_CLIENTS; i++) {
		struct control_client *client = &server->clients[i];

		if (client->connection.job != job)
			continue;
		client->last_ms = clock_now_ms();
		return settle(client, control_finish(&client->connection, subject));
	}
	return CONTROL_GONE;
}

enum control_action control_server_serve(struct control_server *server,
					 const struct control_subject *subject,
					 const struct pollfd fds[static CONTROL_POLL_FDS])
{
	enum control_action action = CONTROL_GO_ON;

	for (unsigned i = 0; i < CONTROL_CLIENTS && action == CONTROL_GO_ON; i++) {
		struct control_client *client = &server->clients[i];

		if (fds[1 + i].fd < 0 || !fds[1 + i].revents)
			continue;
		client->last_ms = clock_now_ms();
		action = settle(client, control_receive(&client->connection, subject));
	}
	/* Do this last: a new client may get the place of one that `fds` still refers to. */
	if (fds[0].revents)
		accept_client(server);
	return action;
}
