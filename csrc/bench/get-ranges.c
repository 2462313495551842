/* SPDX-License-Identifier: MIT */
/*
 * Requests ranges of a URL at 127.0.0.1, one after the other over one kept connection, and does no
 * more than HTTP/1.1 requires: send(), recv() until the body is there. Prints the time of each
 * request as JSON. So it is the least that a client of that server can take.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <getopt.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "base/cleanup.h"
#include "base/message.h"
#include "base/size.h"

#define PROGRAM "btrfs-ublk-get-ranges"

static const char help_text[] =
	"usage: " PROGRAM " --port=PORT --size=BYTES --range=BYTES --count=N PATH\n"
	"\n"
	"Requests N random ranges of the object PATH, which has --size bytes, from\n"
	"127.0.0.1:PORT, and prints {\"us\": [time of each request]}.\n";

enum { HEAD_BYTES = 8192 };

struct getting {
	uint64_t port, size, range, count;
	const char *path;
	int fd;
	char *buffer; /* of HEAD_BYTES + range */
};

static double now_us(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (double)now.tv_sec * 1e6 + (double)now.tv_nsec * 1e-3;
}

static int open_connection(struct getting *getting)
{
	struct sockaddr_in address = {
		.sin_family = AF_INET,
		.sin_port = htons((uint16_t)getting->port),
		.sin_addr.s_addr = htonl(INADDR_LOOPBACK),
	};
	int one = 1;

	getting->fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	if (getting->fd < 0 || connect(getting->fd, (struct sockaddr *)&address, sizeof(address)) ||
	    setsockopt(getting->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one)))
		return -errno;
	return 0;
}

static int send_request(struct getting *getting, uint64_t first)
{
	char text[HEAD_BYTES];
	int length =
		snprintf(text, sizeof(text),
			 "GET %s HTTP/1.1\r\nHost: 127.0.0.1\r\nRange: bytes=%llu-%llu\r\n\r\n",
			 getting->path, (unsigned long long)first,
			 (unsigned long long)(first + getting->range - 1));

	if (length >= (int)sizeof(text))
		return -ENAMETOOLONG;
	if (send(getting->fd, text, (size_t)length, MSG_NOSIGNAL) != length)
		return -EIO;
	return 0;
}

/* Returns the length of the head, 0 if it is not complete yet, or a negative errno. */
static ssize_t head_length(const char *text, uint64_t range)
{
	static const char name[] = "\r\nContent-Length:";
	const char *end = strstr(text, "\r\n\r\n");
	const char *length = strcasestr(text, name);

	if (!end)
		return 0;
	if (strncmp(text, "HTTP/1.1 206 ", 13) || !length || length > end ||
	    strtoull(length + sizeof(name) - 1, NULL, 10) != range)
		return -EPROTO;
	return end + 4 - text;
}

static int receive_answer(struct getting *getting)
{
	size_t have = 0;
	ssize_t head = 0;

	while (!head || have < (size_t)head + getting->range) {
		size_t room = HEAD_BYTES + getting->range - have - 1;
		ssize_t moved = recv(getting->fd, getting->buffer + have, room, 0);

		if (moved <= 0)
			return moved ? -errno : -EPIPE;
		have += (size_t)moved;
		getting->buffer[have] = '\0';
		if (!head)
			head = head_length(getting->buffer, getting->range);
		if (head < 0)
			return (int)head;
	}
	return have == (size_t)head + getting->range ? 0 : -EPROTO;
}

static int get_all(struct getting *getting)
{
	uint64_t random = 0x9e3779b97f4a7c15;

	for (uint64_t i = 0; i < getting->count; i++) {
		double begin_us = now_us();
		int err;

		random ^= random << 13;
		random ^= random >> 7;
		random ^= random << 17;
		err = send_request(getting,
				   random % (getting->size / getting->range) * getting->range);
		if (!err)
			err = receive_answer(getting);
		if (err)
			return err;
		printf("%s%.1f", i ? ", " : "{\"us\": [", now_us() - begin_us);
	}
	puts("]}");
	return 0;
}

static bool take(const char *text, uint64_t most, uint64_t *value)
{
	return !size_parse(text, value) && *value && *value <= most;
}

int main(int argc, char **argv)
{
	static const struct option options[] = {
		{ "port", required_argument, NULL, 'p' },
		{ "size", required_argument, NULL, 's' },
		{ "range", required_argument, NULL, 'r' },
		{ "count", required_argument, NULL, 'c' },
		{ 0 },
	};
	_cleanup_free_ char *buffer = NULL;
	struct getting getting = { .fd = -1 };
	bool is_right = true;
	int err, option;

	message_init(PROGRAM);
	if (answer_options(argc, argv, help_text, &err))
		return err;
	while (is_right && (option = getopt_long(argc, argv, "", options, NULL)) != -1)
		is_right = option == 'p' ? take(optarg, UINT16_MAX, &getting.port) :
			   option == 's' ? take(optarg, INT64_MAX, &getting.size) :
			   option == 'r' ? take(optarg, 1 << 30, &getting.range) :
			   option == 'c' ? take(optarg, 1 << 30, &getting.count) :
					   false;
	if (!is_right || argc - optind != 1 || !getting.port || !getting.count || !getting.range ||
	    getting.size < getting.range)
		return usage_error(
			"a port, a size, a range of at most that, a count and a path are needed",
			NULL);
	getting.path = argv[optind];
	getting.buffer = buffer = malloc(HEAD_BYTES + getting.range);
	err = buffer ? open_connection(&getting) : -ENOMEM;
	if (!err)
		err = get_all(&getting);
	cleanup_close(&getting.fd);
	if (err)
		msg_error("127.0.0.1:%llu%s: %s", (unsigned long long)getting.port, getting.path,
			  strerror(-err));
	return err ? EXIT_FAILED : EXIT_OK;
}
