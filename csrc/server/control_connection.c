/* SPDX-License-Identifier: MIT */
#include "server/control_connection.h"

#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/cleanup.h"
#include "base/clock.h"
#include "base/json_text.h"
#include "server/control_pool.h"

enum {
	/* Limit for one client: far more than it needs, far less than would keep us busy. */
	REQUESTS_PER_S = 1000,
	REQUESTS_AT_ONCE = 1000,
	/*
	 * How much is read at a time, which also limits the requests before others have their turn.
	 */
	RECEIVE_BYTES = 16 << 10,
};

int control_init(struct control_connection *connection, int fd, struct control_pool *pool,
		 int wait_ms)
{
	int type;
	socklen_t bytes = sizeof(type);

	*connection = (struct control_connection){
		.fd = fd,
		.pool = pool,
		.wait_ms = wait_ms,
		.wait_left_ms = wait_ms,
		.passed_fd = -1,
		.allowance = REQUESTS_AT_ONCE,
		.allowed_ms = clock_now_ms(),
	};
	if (fd >= 0 && getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &bytes))
		return -errno;
	return 0;
}

static void forget_passed_fd(struct control_connection *connection)
{
	cleanup_close(&connection->passed_fd);
	connection->passed_fd = -1;
}

static void free_line(struct control_connection *connection)
{
	if (connection->line != connection->first)
		free(connection->line);
	connection->line = NULL;
	connection->used = connection->room = 0;
}

void control_deinit(struct control_connection *connection)
{
	if (connection->job)
		__atomic_store_n(&connection->job->call.over, true, __ATOMIC_RELAXED);
	connection->job = NULL;
	forget_passed_fd(connection);
	free_line(connection);
	cleanup_close(&connection->fd);
	connection->fd = -1;
}

/* Waits until there is room for more. Returns -EAGAIN when the peer has held us up for too long. */
static int wait_for_room(struct control_connection *connection)
{
	struct pollfd room = { .fd = connection->fd, .events = POLLOUT };
	uint64_t begin_ms = clock_now_ms(), waited_ms;
	int found = poll(&room, 1, connection->wait_left_ms);

	if (found < 0)
		return errno == EINTR ? 0 : -errno;
	waited_ms = clock_now_ms() - begin_ms;
	if (waited_ms > (uint64_t)connection->wait_left_ms)
		waited_ms = (uint64_t)connection->wait_left_ms;
	connection->wait_left_ms -= (int)waited_ms;
	return found ? 0 : -EAGAIN;
}

static int send_full(struct control_connection *connection, const char *text, size_t length)
{
	while (length) {
		ssize_t sent = send(connection->fd, text, length, MSG_NOSIGNAL | MSG_DONTWAIT);
		int err = sent < 0 ? -errno : 0;

		if (err == -EAGAIN)
			err = wait_for_room(connection);
		if (err && err != -EINTR)
			return err;
		if (sent < 0)
			continue;
		text += sent;
		length -= (size_t)sent;
	}
	return 0;
}

/* An answer that cannot be made is an error of that request; the connection goes on. */
static const char no_answer[] =
	"{\"error\": \"the server could not put its answer together: it is short of memory\"}";

static int send_line(struct control_connection *connection, const char *line)
{
	int err = send_full(connection, line, strlen(line));

	return err ?: send_full(connection, "\n", 1);
}

int control_send(struct control_connection *connection, json_t *message)
{
	_cleanup_free_ char *text = json_text_dump(message, JSON_COMPACT);
	int err = connection->fd < 0 ? 0 : send_line(connection, text ?: no_answer);

	json_decref(message);
	if (err)
		connection->broken = true;
	return err || text ? err : -ENOMEM;
}

/* Returns how many requests may come now. At most REQUESTS_AT_ONCE are saved up. */
static int64_t allowance(struct control_connection *connection)
{
	uint64_t now = clock_now_ms(),
		 more = (now - connection->allowed_ms) * REQUESTS_PER_S / 1000;

	if (more) {
		connection->allowance += (int64_t)more;
		connection->allowed_ms = now;
	}
	if (connection->allowance > REQUESTS_AT_ONCE)
		connection->allowance = REQUESTS_AT_ONCE;
	return connection->allowance;
}

short control_events(struct control_connection *connection, int *wait_ms)
{
	int64_t rest_ms;

	if (connection->fd < 0 || connection->job)
		return 0;
	/* More may have come at once than was allowed. */
	rest_ms = (1 - allowance(connection)) * 1000 / REQUESTS_PER_S;
	if (rest_ms <= 0)
		return POLLIN;
	if (*wait_ms < 0 || *wait_ms > rest_ms)
		*wait_ms = (int)rest_ms;
	return 0;
}

static enum control_action give(struct control_connection *connection, struct control_job *job)
{
	job->call.fd = connection->passed_fd;
	connection->passed_fd = -1;
	if (control_pool_submit(connection->pool, job)) {
		connection->job = job;
		return CONTROL_GO_ON;
	}
	control_job_free(job);
	control_send(connection, control_error("the server has too much to do; try again later"));
	return CONTROL_GO_ON;
}

/* Takes the reference. */
static enum control_action handle_message(struct control_connection *connection,
					  const struct control_subject *subject, json_t *message)
{
	enum control_action action = CONTROL_GO_ON;
	struct control_job *job;
	uint64_t losses = json_text_losses();
	json_t *reply = NULL;
	const struct control_kind *kind = control_kind_of(message, &reply);

	if (kind && kind->work && connection->pool) {
		job = calloc(1, sizeof(*job));
		if (job) {
			*job = (struct control_job){ .call = { .message = message }, .kind = kind };
			return give(connection, job);
		}
	} else if (kind && kind->answer) {
		action = kind->answer(subject, &reply);
	}
	json_decref(message);
	forget_passed_fd(connection);
	control_send(connection, control_whole(reply, losses));
	return action;
}

static enum control_action handle_line(struct control_connection *connection,
				       const struct control_subject *subject, size_t length)
{
	struct control_job *job;
	json_error_t error;
	json_t *message;

	if (length <= CONTROL_SHORT_BYTES) {
		message = json_text_parse(connection->line, length, JSON_REJECT_DUPLICATES, &error);
		if (message)
			return handle_message(connection, subject, message);
		forget_passed_fd(connection);
		control_send(connection, control_error(json_text_fault(&error)));
		return CONTROL_GO_ON;
	}
	job = calloc(1, sizeof(*job));
	if (job)
		job->line = malloc(length);
	if (!job || !job->line) {
		free(job);
		forget_passed_fd(connection);
		control_send(connection, NULL);
		return CONTROL_GO_ON;
	}
	memcpy(job->line, connection->line, length);
	job->length = length;
	return give(connection, job);
}

/* Handles all whole lines, up to one whose request takes long. */
static enum control_action handle_lines(struct control_connection *connection,
					const struct control_subject *subject)
{
	enum control_action action = CONTROL_GO_ON;
	char *end;

	while (action == CONTROL_GO_ON && !connection->job && !connection->broken &&
	       connection->used &&
	       (end = memchr(connection->line, '\n', connection->used)) != NULL) {
		size_t length = (size_t)(end - connection->line);

		connection->allowance--;
		if (connection->skipping)
			connection->skipping = false;
		else
			action = handle_line(connection, subject, length);
		connection->used -= length + 1;
		memmove(connection->line, end + 1, connection->used);
	}
	if (!connection->used)
		free_line(connection);
	return action;
}

static size_t longest_line(const struct control_connection *connection)
{
	return connection->pool ? CONTROL_LINE_BYTES : CONTROL_SHORT_BYTES;
}

static void skip_line(struct control_connection *connection, json_t *why)
{
	if (connection->skipping)
		json_decref(why);
	else
		control_send(connection, why);
	connection->skipping = true;
	connection->used = 0;
}

/* Returns a line of twice the length, or NULL when memory is short. */
static char *longer_line(const struct control_connection *connection)
{
	char *line;

	if (connection->line != connection->first)
		return realloc(connection->line, 2 * connection->room);
	line = malloc(2 * connection->room);
	return line ? memcpy(line, connection->first, connection->used) : NULL;
}

/* Makes room for more, and drops lines that are too long. */
static void make_room(struct control_connection *connection)
{
	char *line;

	if (!connection->line) {
		connection->line = connection->first;
		connection->room = sizeof(connection->first);
	}
	if (connection->used < connection->room)
		return;
	if (connection->room == longest_line(connection)) {
		skip_line(connection, control_error("request too long"));
		return;
	}
	line = longer_line(connection);
	if (!line) {
		skip_line(connection, NULL);
		return;
	}
	connection->line = line;
	connection->room *= 2;
}

/* The request gets the first of the descriptors that came; no request needs more. */
static void take_descriptors(struct control_connection *connection, struct msghdr *header)
{
	for (struct cmsghdr *part = CMSG_FIRSTHDR(header); part; part = CMSG_NXTHDR(header, part)) {
		size_t count = (part->cmsg_len - CMSG_LEN(0)) / sizeof(int);

		if (part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS)
			continue;
		for (size_t i = 0; i < count; i++) {
			int fd;

			memcpy(&fd, CMSG_DATA(part) + i * sizeof(int), sizeof(fd));
			if (connection->passed_fd < 0 && connection->pool)
				connection->passed_fd = fd;
			else
				close(fd);
		}
	}
}

static ssize_t receive(struct control_connection *connection)
{
	/* The kernel could pass 253 at once; it drops those that do not fit. */
	union {
		char data[CMSG_SPACE(4 * sizeof(int))];
		struct cmsghdr align;
	} control;
	size_t room = connection->room - connection->used;
	struct iovec into = { connection->line + connection->used,
			      room < RECEIVE_BYTES ? room : RECEIVE_BYTES };
	struct msghdr header = {
		.msg_iov = &into,
		.msg_iovlen = 1,
		.msg_control = control.data,
		.msg_controllen = sizeof(control.data),
	};
	ssize_t got = recvmsg(connection->fd, &header, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);

	if (got >= 0)
		take_descriptors(connection, &header);
	return got;
}

enum control_action control_receive(struct control_connection *connection,
				    const struct control_subject *subject)
{
	ssize_t got;

	/* NB: no request is pending, so no answer is due, and this is the end. */
	if (connection->job)
		return CONTROL_GONE;
	make_room(connection);
	got = receive(connection);
	if (got < 0 && (errno == EINTR || errno == EAGAIN))
		return CONTROL_GO_ON;
	if (got <= 0)
		return CONTROL_GONE;
	connection->used += (size_t)got;
	connection->wait_left_ms = connection->wait_ms;
	return handle_lines(connection, subject);
}

enum control_action control_finish(struct control_connection *connection,
				   const struct control_subject *subject)
{
	struct control_job *job = connection->job;
	enum control_action action = CONTROL_GO_ON;
	uint64_t losses = json_text_losses();
	json_t *reply;

	connection->job = NULL;
	connection->wait_left_ms = connection->wait_ms;
	/* The long line was an ordinary request, such as "stop" with many spaces. */
	if (!job->reply && job->kind && !job->kind->work && job->kind->answer) {
		action = job->kind->answer(subject, &job->reply);
		job->reply = control_whole(job->reply, losses);
	}
	/* Close the descriptor first: a client that has the reply relies on that. */
	reply = json_incref(job->reply);
	control_job_free(job);
	control_send(connection, reply);
	return action == CONTROL_GO_ON ? handle_lines(connection, subject) : action;
}
