/* SPDX-License-Identifier: MIT */
#include "server/control_connection.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>

#include "base/cleanup.h"

enum { SEND_WAIT_S = 5 };

int control_init(struct control_connection *connection, int fd)
{
	struct timeval wait = { .tv_sec = SEND_WAIT_S };

	*connection = (struct control_connection){ .fd = fd };
	if (fd >= 0 && setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &wait, sizeof(wait)))
		return -errno;
	return 0;
}

static int send_full(int fd, const char *text, size_t length)
{
	while (length) {
		ssize_t sent = send(fd, text, length, MSG_NOSIGNAL);

		if (sent < 0 && errno == EINTR)
			continue;
		if (sent < 0)
			return -errno;
		text += sent;
		length -= (size_t)sent;
	}
	return 0;
}

static int send_line(int fd, const json_t *message)
{
	_cleanup_free_ char *text = json_dumps(message, JSON_COMPACT);
	int err;

	if (!text)
		return -ENOMEM;
	err = send_full(fd, text, strlen(text));
	return err ? err : send_full(fd, "\n", 1);
}

int control_send(struct control_connection *connection, json_t *message)
{
	int err = connection->fd < 0 ? 0 : send_line(connection->fd, message);

	json_decref(message);
	if (err)
		connection->broken = true;
	return err;
}

static enum control_action handle_line(struct control_connection *connection,
				       const struct control_subject *subject, size_t length)
{
	json_t *reply = NULL;
	enum control_action action = control_request(subject, connection->line, length, &reply);

	control_send(connection, reply);
	return action;
}

enum control_action control_receive(struct control_connection *connection,
				    const struct control_subject *subject)
{
	enum control_action action = CONTROL_GO_ON;
	size_t room = sizeof(connection->line) - connection->used;
	ssize_t got = recv(connection->fd, connection->line + connection->used, room, MSG_DONTWAIT);
	char *end;

	if (got < 0 && (errno == EINTR || errno == EAGAIN))
		return CONTROL_GO_ON;
	if (got <= 0)
		return CONTROL_GONE;
	connection->used += (size_t)got;
	while (action == CONTROL_GO_ON &&
	       (end = memchr(connection->line, '\n', connection->used)) != NULL) {
		size_t length = (size_t)(end - connection->line);

		if (connection->skipping)
			connection->skipping = false;
		else
			action = handle_line(connection, subject, length);
		connection->used -= length + 1;
		memmove(connection->line, end + 1, connection->used);
	}
	if (connection->used == sizeof(connection->line)) {
		if (!connection->skipping)
			control_send(connection, control_error("request too long"));
		connection->skipping = true;
		connection->used = 0;
	}
	return action;
}
