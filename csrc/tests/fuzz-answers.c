/* SPDX-License-Identifier: MIT */
/*
 * fuzz-answers: what web servers, registries and token servers answer, over a connection. The input
 * says what is asked for, and has the answers: each request gets the next one. They are separated
 * by 0xff and a byte, whose lowest bit says whether the connection ends with this answer. So heads,
 * chunked and other bodies, ranges, redirects, challenges and tokens are parsed, by our carrier
 * and, where that one refuses an answer, by libcurl.
 *
 * Each run and inquiry must end once, not more may arrive than was asked for, and nothing is left.
 */
#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>
#include <uv.h>

#include "content/source.h"
#include "fetch/inquiry.h"
#include "fetch/mirror/remote.h"
#include "tests/fetcher.h"
#include "tests/fuzz.h"

enum { PEERS_MAX = 64, STEPS_MAX = 400, IDLE_STEPS_MAX = 20, SEPARATOR = 0xff };

static const char *const descriptions[] = {
	"{\"kind\": \"http\", \"url\": \"http://127.0.0.1:1/a\", \"proxy\": \"none\","
	" \"size\": 1048576}",
	"{\"kind\": \"oci\", \"registry\": \"127.0.0.1:1\", \"insecure\": true, \"proxy\": \"none\","
	" \"repository\": \"x/y\", \"size\": 1048576, \"digest\": \"sha256:"
	"e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855\"}",
	"{\"size\": 1048576, \"kind\": \"http\", \"url\": \"http://127.0.0.1:1/a\","
	" \"proxy\": \"none\", \"via\": [\"http://127.0.0.1:2\"]}",
};
enum { DESCRIPTIONS = sizeof(descriptions) / sizeof(*descriptions) };

/* The other ends of connections. */
static struct peer {
	int fd;		  /* -1: none */
	unsigned matched; /* of the end of a request */
} peers[PEERS_MAX];
static struct fuzz_input answers;
static bool has_answered;

/* In the place of libc's, for libcurl as well: connect() gets one end of a pair. */
int connect(int fd, const struct sockaddr *address, socklen_t bytes);

int connect(int fd, const struct sockaddr *address, socklen_t bytes)
{
	struct peer *peer = peers;
	int ends[2];

	(void)address, (void)bytes;
	while (peer < peers + PEERS_MAX && peer->fd >= 0)
		peer++;
	if (peer == peers + PEERS_MAX) {
		errno = ECONNREFUSED;
		return -1;
	}
	if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends) ||
	    dup3(ends[0], fd, O_CLOEXEC) < 0)
		abort();
	close(ends[0]);
	*peer = (struct peer){ .fd = ends[1] };
	return 0;
}

/* Redirects may name any host: no name server is asked. */
int getaddrinfo(const char *host, const char *service, const struct addrinfo *hints,
		struct addrinfo **found)
{
	(void)host, (void)service, (void)hints, (void)found;
	return EAI_NONAME;
}

static void hang_up(struct peer *peer)
{
	if (peer->fd >= 0)
		close(peer->fd);
	peer->fd = -1;
}

static void answer(struct peer *peer)
{
	const uint8_t *end = memchr(answers.data, SEPARATOR, answers.length);
	size_t bytes = end ? (size_t)(end - answers.data) : answers.length;
	bool ends = !end || bytes + 1 == answers.length || end[1] & 1;
	bool has_any = answers.length;

	/* Cut where the stream is full. */
	if (bytes)
		(void)!send(peer->fd, answers.data, bytes, MSG_NOSIGNAL | MSG_DONTWAIT);
	bytes += end ? 2 : 0;
	if (bytes > answers.length)
		bytes = answers.length;
	answers.data += bytes;
	answers.length -= bytes;
	if (ends || !has_any)
		hang_up(peer);
	has_answered = true;
}

static void hear(struct peer *peer)
{
	static const char end[] = "\r\n\r\n";
	char data[4096];
	ssize_t got = recv(peer->fd, data, sizeof(data), MSG_DONTWAIT);

	if (!got)
		hang_up(peer);
	for (ssize_t i = 0; i < got && peer->fd >= 0; i++) {
		peer->matched = data[i] == end[peer->matched] ? peer->matched + 1 : data[i] == '\r';
		if (peer->matched < sizeof(end) - 1)
			continue;
		peer->matched = 0;
		answer(peer);
	}
}

static int read_credentials(struct remote *remote, struct login *login, struct error *error)
{
	if (remote->refused)
		return error_set(error, -EACCES, "there are no others");
	login->user = strdup("somebody");
	login->password = strdup("secret");
	return 0;
}

static bool inquiry_active;

static void inquiry_done(struct inquiry *inquiry)
{
	fuzz_require(inquiry_active, "an inquiry is over twice");
	fuzz_require(inquiry->result <= 0, "no errno");
	fuzz_require(!inquiry->result || *inquiry->error.text, "refused without a reason");
	inquiry_active = false;
	free(inquiry->found.identity);
	free(inquiry->text);
}

static void go_on(const struct fuzz_request *request)
{
	unsigned idle = 0;

	for (unsigned i = 0;
	     i < STEPS_MAX && (request->active || inquiry_active) && idle < IDLE_STEPS_MAX; i++) {
		has_answered = false;
		fuzz_do_jobs();
		uv_run(&fuzz_loop, UV_RUN_NOWAIT);
		for (struct peer *peer = peers; peer < peers + PEERS_MAX; peer++) {
			if (peer->fd >= 0)
				hear(peer);
		}
		idle = has_answered ? 0 : idle + 1;
	}
}

/* A request without an answer ends by its deadline, or because it is given up. */
static void end_all(struct fuzz_request *request)
{
	if (request->active)
		request->run.mirror->ops->cancel(&request->run);
	for (unsigned i = 0; i < STEPS_MAX && (request->active || inquiry_active); i++) {
		for (struct peer *peer = peers; peer < peers + PEERS_MAX; peer++)
			hang_up(peer);
		fuzz_do_jobs();
		uv_run(&fuzz_loop, UV_RUN_NOWAIT);
		fuzz_pass(NS_PER_S);
		/* libcurl looks names up on a thread. */
		if (i > IDLE_STEPS_MAX)
			usleep(1000);
	}
	fuzz_require(!request->active, "a run does not end");
	fuzz_require(!inquiry_active, "an inquiry does not end");
}

static struct source *parse(const char *text)
{
	struct error error = {};
	struct source *source = NULL;
	json_t *json = json_loads(text, 0, NULL);

	if (!json || source_parse(json, &source, &error)) {
		fprintf(stderr, "fuzz-answers: %s\n", error.text);
		abort();
	}
	json_decref(json);
	return source;
}

static void run(const uint8_t *data, size_t length)
{
	static const uint32_t lengths[] = { 1, 16, 4096, 65536 };
	static struct fuzz_request request;
	struct inquiry inquiry = {};
	struct fuzz_input input = { data, length };
	uint64_t which = fuzz_take(&input, 1), how = fuzz_take(&input, 1);
	struct source *source = parse(descriptions[which % DESCRIPTIONS]);
	struct mirror *mirror = &source->mirrors[0];

	fuzz_now_ns = NS_PER_S;
	fuzz_budget = how & 0x40 ? 5 : UINT64_MAX;
	answers = input;
	if (which & 0x80 && source->place_count > 1)
		mirror = &source->mirrors[source->place_count - 1];
	if (how & 0x10)
		mirror_object(mirror)->identity = strdup("etag \"abc\"");
	if (how & 0x20) {
		inquiry_active = true;
		inquiry = (struct inquiry){
			.fetcher = &fuzz_fetcher,
			.mirror = mirror,
			.name = how & 1 && mirror->ops->has_names ? "latest" : NULL,
			.deadline_ns = fuzz_now_ns + 5 * NS_PER_S,
			.done = inquiry_done,
		};
		mirror->ops->inquire(&inquiry);
	} else {
		request = (struct fuzz_request){
			.run = { .mirror = mirror,
				 .offset = how & 8 ? 4096 : 0,
				 .length = lengths[how % 4],
				 .deadline_ns = fuzz_now_ns + 5 * NS_PER_S,
				 .sized = how & 4,
				 .widens = how & 8 &&
					   source->object_bytes <= SOURCE_WHOLE_MAX_BYTES,
				 .fresh = how & 0x80 },
		};
		fuzz_request_start(&request);
	}
	go_on(&request);
	if (request.active && request.waits) {
		fuzz_budget = UINT64_MAX;
		request.run.mirror->ops->resume(&request.run);
		go_on(&request);
	}
	end_all(&request);
	for (struct peer *peer = peers; peer < peers + PEERS_MAX; peer++)
		hang_up(peer);
	attachments_close(&fuzz_fetcher);
	for (unsigned i = 0; i < STEPS_MAX && uv_loop_alive(&fuzz_loop); i++) {
		fuzz_do_jobs();
		uv_run(&fuzz_loop, UV_RUN_NOWAIT);
	}
	fuzz_require(!uv_loop_alive(&fuzz_loop), "the loop has something left");
	source_free(source);
}

static void begin(const char *path)
{
	(void)path;
	event_send_to(fuzz_drop_event);
	remote_hooks.read = read_credentials;
	for (unsigned i = 0; i < PEERS_MAX; i++)
		peers[i].fd = -1;
	if (uv_loop_init(&fuzz_loop))
		abort();
}

static void end(void)
{
	uv_loop_close(&fuzz_loop);
}

static const struct fuzzer fuzzer = {
	.name = "fuzz-answers",
	.input_bytes = 2048,
	.begin = begin,
	.run = run,
	.end = end,
};
FUZZ_PROGRAM(fuzzer)
