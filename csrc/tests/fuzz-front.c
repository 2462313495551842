/* SPDX-License-Identifier: MIT */
/*
 * fuzz-front: the server's end of the stream from its fetch process (fetch/process/), while the
 * process says anything. The input is a program: messages with any content, any bytes in the
 * stream, writes to the shared windows, the process' end; and what the server itself does
 * meanwhile: it begins runs and inquiries, cancels them, has no memory for a while, reads logins,
 * and lets time pass. This program also takes the place of what starts processes.
 *
 * Each run and inquiry must end once; not more may arrive than was asked for, nor outside of where
 * it belongs; and at the end nothing is left.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>
#include <uv.h>

#include "fetch/attachment.h"
#include "fetch/mirror/object.h"
#include "fetch/mirror/remote.h"
#include "fetch/process/front.h"
#include "fetch/process/internal.h"
#include "tests/fetcher.h"
#include "tests/fuzz.h"

enum {
	RUNS_MAX = 160, /* more than there are slots */
	INQUIRIES_MAX = 8,
	MIRRORS_MAX = 4,
	RAW_BYTES_MAX = 64,
	STEPS_MAX = 2000,
};

struct asked {
	struct inquiry inquiry;
	bool active;
};

static struct source *sources[2];
static struct mirror *mirrors[MIRRORS_MAX];
static struct fuzz_request requests[RUNS_MAX];
static struct asked inquiries[INQUIRIES_MAX];
static int peer = -1; /* the process' end */
static bool starts_fail;

/* In the place of spawn.c. The windows are always the same ones, as mapping them takes long. */

static uint8_t *windows;

int __wrap_munmap(void *start, size_t length);

int __wrap_munmap(void *start, size_t length)
{
	fuzz_require(start == windows && length == CHANNEL_WINDOWS_BYTES, "other memory");
	return 0;
}

int spawn_start(int program_fd, struct spawned *spawned, struct error *error)
{
	int ends[2];

	(void)program_fd;
	if (starts_fail)
		return error_set(error, -EAGAIN, "no process");
	if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends))
		abort();
	if (peer >= 0)
		close(peer);
	peer = ends[1];
	*spawned = (struct spawned){ .pid = 1, .fd = ends[0], .windows = windows };
	return 0;
}

void spawn_end(pid_t pid)
{
	(void)pid;
	if (peer >= 0)
		close(peer);
	peer = -1;
}

static int read_credentials(struct remote *remote, struct login *login, struct error *error)
{
	if (remote->refused)
		return error_set(error, -EACCES, "there are no others");
	return login_add_header(login, "X-Token: %s", "secret");
}

/* Runs. */

static void begin_run(struct fuzz_input *input)
{
	static const uint32_t lengths[] = {
		1, 4096, 65536, CHANNEL_WINDOW_BYTES, CHANNEL_WINDOW_BYTES + 4096, 2 << 20
	};
	struct fuzz_request *request = requests;

	while (request < requests + RUNS_MAX && request->active)
		request++;
	if (request == requests + RUNS_MAX)
		return;
	*request = (struct fuzz_request){
		.run = { .mirror = mirrors[fuzz_take(input, 1) % MIRRORS_MAX],
			 .length = lengths[fuzz_take(input, 1) % 6],
			 .deadline_ns = fuzz_now_ns + (1 + fuzz_take(input, 1)) * 100 * NS_PER_MS,
			 .sized = fuzz_take(input, 1) % 2 },
	};
	request->run.widens = request->run.mirror->source == sources[0];
	fuzz_request_start(request);
}

static void inquiry_done(struct inquiry *inquiry)
{
	struct asked *asked = container_of(inquiry, struct asked, inquiry);

	fuzz_require(asked->active, "an inquiry is over twice");
	fuzz_require(inquiry->result <= 0, "no errno");
	free(inquiry->found.identity);
	free(inquiry->text);
	asked->active = false;
}

static void begin_inquiry(struct fuzz_input *input)
{
	struct asked *asked = inquiries;

	while (asked < inquiries + INQUIRIES_MAX && asked->active)
		asked++;
	if (asked == inquiries + INQUIRIES_MAX)
		return;
	*asked = (struct asked){
		.active = true,
		.inquiry = { .fetcher = &fuzz_fetcher,
			     .mirror = mirrors[fuzz_take(input, 1) % MIRRORS_MAX],
			     .name = fuzz_take(input, 1) % 2 ? "latest" : NULL,
			     .deadline_ns =
				     fuzz_now_ns + (1 + fuzz_take(input, 1)) * 100 * NS_PER_MS,
			     .done = inquiry_done },
	};
	/* Not ops->inquire(), which prepares what only servers are asked for. */
	object_front->inquire(&asked->inquiry);
}

/* What the process does. */

static void say(const void *data, size_t bytes)
{
	/* Cut where the stream is full. */
	if (peer >= 0)
		(void)!send(peer, data, bytes, MSG_NOSIGNAL | MSG_DONTWAIT);
}

static uint32_t take_number(struct fuzz_input *input)
{
	static const uint32_t numbers[] = {
		0,
		1,
		2,
		4096,
		65536,
		CHANNEL_WINDOW_BYTES,
		CHANNEL_WINDOW_BYTES + 1,
		CHANNEL_WINDOW_BYTES + 4096,
		2 << 20,
		UINT32_MAX,
		CHANNEL_OF_INQUIRY,
		CHANNEL_OF_INQUIRY + 1,
		1u << 31,
		(uint32_t)-5,
		(uint32_t)-4096,
		CHANNEL_VERSION,
	};
	uint8_t which = (uint8_t)fuzz_take(input, 1);

	return which < 16   ? numbers[which] :
	       which == 255 ? (uint32_t)fuzz_take(input, 4) :
			      which % 32;
}

/* Numbers, and then any bytes. */
static void say_message(struct fuzz_input *input)
{
	static const uint8_t ops[] = { CHANNEL_IDENTITY, CHANNEL_ARRIVED, CHANNEL_ARRIVED,
				       CHANNEL_OVER,	 CHANNEL_OVER,	  CHANNEL_ASK_LOGIN,
				       CHANNEL_ANSWER,	 CHANNEL_EVENT,	  CHANNEL_PONG,
				       CHANNEL_HELLO,	 CHANNEL_PING,	  CHANNEL_START,
				       CHANNEL_WHOLE };
	uint8_t message[sizeof(struct channel_head) + 8 * sizeof(uint32_t) + RAW_BYTES_MAX];
	uint8_t *at = message + sizeof(struct channel_head);
	uint64_t how = fuzz_take(input, 1), counts = fuzz_take(input, 1);
	struct channel_head head = { .op = ops[how % sizeof(ops)] };
	size_t raw = counts / 8 % RAW_BYTES_MAX;

	head.slot = (uint16_t)take_number(input);
	if (how / sizeof(ops) % 4 == 1)
		head.op = (uint16_t)fuzz_take(input, 2);
	for (unsigned i = counts % 8; i; i--) {
		uint32_t number = take_number(input);

		memcpy(at, &number, sizeof(number));
		at += sizeof(number);
	}
	for (; raw; raw--)
		*at++ = (uint8_t)fuzz_take(input, 1);
	head.bytes = (uint32_t)(at - message - sizeof(head));
	if (how / sizeof(ops) % 8 == 2)
		head.bytes = take_number(input);
	memcpy(message, &head, sizeof(head));
	say(message, (size_t)(at - message));
}

static void say_raw(struct fuzz_input *input)
{
	uint8_t data[RAW_BYTES_MAX];
	size_t bytes = fuzz_take(input, 1) % RAW_BYTES_MAX;

	for (size_t i = 0; i < bytes; i++)
		data[i] = (uint8_t)fuzz_take(input, 1);
	say(data, bytes);
}

static void greet(void)
{
	const struct {
		struct channel_head head;
		struct channel_hello hello;
	} hello = { { sizeof(struct channel_hello), CHANNEL_HELLO, 0 }, { CHANNEL_VERSION, 0 } };

	say(&hello, sizeof(hello));
}

/* What the server has told it. */
static void hear(void)
{
	uint8_t data[4096];

	while (peer >= 0 && recv(peer, data, sizeof(data), MSG_DONTWAIT) > 0)
		;
}

static void go_on(void)
{
	uv_run(&fuzz_loop, UV_RUN_NOWAIT);
	hear();
}

static void have_memory(void)
{
	for (unsigned i = 0; i < RUNS_MAX; i++) {
		if (requests[i].active && requests[i].waits)
			requests[i].run.mirror->ops->resume(&requests[i].run);
	}
}

static void step(struct fuzz_input *input)
{
	uint64_t what = fuzz_take(input, 1), number;

	switch (what % 16) {
	case 0:
		begin_run(input);
		break;
	case 1:
		begin_inquiry(input);
		break;
	case 2:
		number = fuzz_take(input, 1);
		if (number < RUNS_MAX && requests[number].active)
			requests[number].run.mirror->ops->cancel(&requests[number].run);
		break;
	case 3:
		fuzz_budget = fuzz_take(input, 1) << 12;
		have_memory();
		break;
	case 4:
		if (fuzz_job_count)
			fuzz_do_job((unsigned)(fuzz_take(input, 1) % fuzz_job_count));
		break;
	case 5:
		fuzz_pass(fuzz_take(input, 1) * 10 * NS_PER_MS);
		break;
	case 6:
		number = fuzz_take(input, 1) % CHANNEL_SLOTS;
		if (front_of(&fuzz_fetcher)->state == STATE_UP)
			memset(front_of(&fuzz_fetcher)->process.windows +
				       number * CHANNEL_WINDOW_BYTES,
			       (int)what, 16);
		break;
	case 7:
		say_raw(input);
		break;
	case 8:
		if (peer >= 0 && fuzz_take(input, 1) % 4 == 0)
			shutdown(peer, SHUT_RDWR);
		break;
	case 9:
		greet();
		break;
	case 10:
		starts_fail = fuzz_take(input, 1) % 2;
		break;
	default:
		say_message(input);
	}
	if (what & 0x10)
		go_on();
}

/* All that goes on comes to its end, whatever the process says. */
static void end_all(const struct front *front)
{
	bool ends = false;

	fuzz_budget = UINT64_MAX;
	starts_fail = false;
	have_memory();
	for (unsigned i = 0; i < RUNS_MAX; i++) {
		if (i % 2 && requests[i].active)
			requests[i].run.mirror->ops->cancel(&requests[i].run);
	}
	for (unsigned i = 0; i < STEPS_MAX && !ends; i++) {
		fuzz_do_jobs();
		go_on();
		fuzz_pass(NS_PER_S);
		ends = !fuzz_job_count && front->state == STATE_NONE && !front->busy &&
		       !fuzz_has_timers();
	}
	for (unsigned i = 0; i < RUNS_MAX; i++)
		fuzz_require(!requests[i].active, "a run does not end");
	for (unsigned i = 0; i < INQUIRIES_MAX; i++)
		fuzz_require(!inquiries[i].active, "an inquiry does not end");
	fuzz_require(ends && !front->logins, "there is no end");
}

/* As a fetcher that is stopped: nothing waits any more, but the process may go on. */
static void end_at_once(void)
{
	bool waits = true;

	for (unsigned i = 0; i < RUNS_MAX; i++) {
		if (requests[i].active)
			requests[i].run.mirror->ops->cancel(&requests[i].run);
	}
	for (unsigned i = 0; i < STEPS_MAX && (waits || fuzz_job_count); i++) {
		fuzz_do_jobs();
		fuzz_pass(NS_PER_S / 8);
		waits = false;
		for (unsigned k = 0; k < INQUIRIES_MAX; k++)
			waits |= inquiries[k].active;
	}
	fuzz_require(!waits, "an inquiry does not end");
}

static void run(const uint8_t *data, size_t length)
{
	struct fuzz_input input = { data, length };
	struct front *front = front_of(&fuzz_fetcher);
	uint64_t how = fuzz_take(&input, 1);

	fuzz_now_ns = NS_PER_S;
	fuzz_budget = UINT64_MAX;
	if (how % 8) {
		begin_run(&input);
		fuzz_do_jobs();
		greet();
		go_on();
	}
	while (input.length)
		step(&input);
	go_on();
	if (how / 8 % 4)
		end_all(front);
	else
		end_at_once();
	for (unsigned i = 0; i < MIRRORS_MAX; i++)
		mirrors[i]->known = 0;
	attachments_close(&fuzz_fetcher);
	fuzz_do_jobs();
	uv_run(&fuzz_loop, UV_RUN_NOWAIT);
	fuzz_require(!uv_loop_alive(&fuzz_loop), "the loop has something left");
	if (peer >= 0)
		close(peer);
	peer = -1;
}

static struct source *parse(const char *text)
{
	struct error error = {};
	struct source *source = NULL;
	json_t *json = json_loads(text, 0, NULL);

	if (!json || source_parse(json, &source, &error)) {
		fprintf(stderr, "fuzz-front: %s\n", error.text);
		abort();
	}
	json_decref(json);
	return source;
}

static void begin(const char *path)
{
	(void)path;
	event_send_to(fuzz_drop_event);
	front_use("/proc/self/exe", 0);
	remote_hooks.read = read_credentials;
	windows = mmap(NULL, CHANNEL_WINDOWS_BYTES, PROT_READ | PROT_WRITE,
		       MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (windows == MAP_FAILED || uv_loop_init(&fuzz_loop))
		abort();
	sources[0] =
		parse("{\"size\": 4194304, \"mirrors\": ["
		      "{\"kind\": \"http\", \"url\": \"http://127.0.0.1:1/a\", \"proxy\": \"none\","
		      " \"via\": [\"http://127.0.0.1:2\"]},"
		      "{\"kind\": \"http\", \"url\": \"http://127.0.0.1:1/b\"}]}");
	sources[1] = parse("{\"size\": 16777216, \"mirrors\": ["
			   "{\"kind\": \"oci\", \"registry\": \"127.0.0.1:1\", \"insecure\": true,"
			   " \"repository\": \"x/y\", \"digest\": \"sha256:"
			   "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855\"}]}");
	mirrors[0] = &sources[0]->mirrors[0];
	mirrors[1] = &sources[0]->mirrors[1];
	mirrors[2] = &sources[0]->mirrors[sources[0]->place_count - 1];
	mirrors[3] = &sources[1]->mirrors[0];
}

static void end(void)
{
	source_free(sources[0]);
	source_free(sources[1]);
	uv_loop_close(&fuzz_loop);
}

static const struct fuzzer fuzzer = {
	.name = "fuzz-front",
	.input_bytes = 1024,
	.begin = begin,
	.run = run,
	.end = end,
};
FUZZ_PROGRAM(fuzzer)
