/* SPDX-License-Identifier: MIT */
#include "server/control_connection.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>

#include "base/cleanup.h"
#include "server/stats.h"

enum { SEND_WAIT_S = 5 };

int control_init(struct control_connection *connection, int fd, const struct engine *engine)
{
	struct timeval wait = { .tv_sec = SEND_WAIT_S };

	*connection = (struct control_connection){ .fd = fd, .engine = engine };
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

int control_send(struct control_connection *connection, json_t *message)
{
	_cleanup_free_ char *text = json_dumps(message, JSON_COMPACT);
	int err;

	json_decref(message);
	if (!text)
		return -ENOMEM;
	if (connection->fd < 0)
		return 0;
	err = send_full(connection->fd, text, strlen(text));
	return err ? err : send_full(connection->fd, "\n", 1);
}

static int send_error(struct control_connection *connection, const char *text)
{
	return control_send(connection, json_pack("{s:s}", "error", text));
}

static enum control_action handle(struct control_connection *connection, json_t *message)
{
	const char *request = json_string_value(json_object_get(message, "request"));

	if (!request) {
		send_error(connection, "a request is an object with a string \"request\"");
	} else if (!strcmp(request, "stats")) {
		control_send(connection, json_pack("{s:s, s:o}", "reply", "stats", "stats",
						   stats_json(connection->engine)));
	} else if (!strcmp(request, "stop")) {
		control_send(connection, json_pack("{s:s}", "reply", "stop"));
		return CONTROL_STOP;
	} else {
		send_error(connection, "unknown request; known: stats, stop");
	}
	return CONTROL_GO_ON;
}

static enum control_action handle_line(struct control_connection *connection, const char *line,
				       size_t length)
{
	json_error_t error;
	json_t *message = json_loadb(line, length, JSON_REJECT_DUPLICATES, &error);
	enum control_action action;

	if (!message) {
		send_error(connection, "not valid JSON");
		return CONTROL_GO_ON;
	}
	action = handle(connection, message);
	json_decref(message);
	return action;
}

enum control_action control_receive(struct control_connection *connection)
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
			action = handle_line(connection, connection->line, length);
		connection->used -= length + 1;
		memmove(connection->line, end + 1, connection->used);
	}
	if (connection->used == sizeof(connection->line)) {
		if (!connection->skipping)
			send_error(connection, "request too long");
		connection->skipping = true;
		connection->used = 0;
	}
	return action;
}
