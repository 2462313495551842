/* SPDX-License-Identifier: MIT */
/*
 * mirror-shell SOURCE.json: the first mirror of a source by itself, without retries. This program
 * has a fetcher of its own. Driven from standard input, line by line:
 *
 *   probe TIMEOUT_MS
 *   pin IDENTITY                             the identity that the object had before
 *   fetch OFFSET LENGTH TIMEOUT_MS COUNT     COUNT ranges at a time, one behind the other
 *   cancel OFFSET LENGTH AFTER_MS            begins a fetch, and gives it up
 *
 * Each answer is a JSON object on a line. The bytes of a fetch with "result" 0 follow its answer.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <uv.h>

#include "base/message.h"
#include "content/source.h"
#include "fetch/attachment.h"
#include "fetch/event.h"
#include "fetch/fetcher_ops.h"
#include "fetch/inquiry.h"
#include "fetch/run.h"

struct request {
	struct run run;
	uint8_t *data;
	size_t filled;
	bool done;
};

static uv_loop_t loop;
static unsigned running;

struct work {
	uv_work_t request;
	struct pool_job *job;
};

static void on_worker(uv_work_t *request)
{
	struct work *work = container_of(request, struct work, request);

	work->job->work(work->job);
}

static void after_work(uv_work_t *request, int status)
{
	struct work *work = container_of(request, struct work, request);

	(void)status;
	work->job->done(work->job);
	free(work);
}

static void submit(struct fetcher *fetcher, struct pool_job *job)
{
	struct work *work = calloc(1, sizeof(*work));

	if (!work)
		abort();
	work->job = job;
	uv_queue_work(fetcher->loop, &work->request, on_worker, after_work);
}

static bool take_back(struct fetcher *fetcher, struct pool_job *job)
{
	(void)fetcher;
	(void)job;
	return false;
}

static bool answered;

static void inquiry_done(struct inquiry *inquiry)
{
	(void)inquiry;
	answered = true;
	uv_stop(&loop);
}

static void inquire(struct fetcher *fetcher, struct inquiry *inquiry)
{
	answered = false;
	inquiry->done = inquiry_done;
	inquiry->mirror->ops->inquire(inquiry);
	while (!answered)
		uv_run(fetcher->loop, UV_RUN_ONCE);
}

static const struct fetcher_ops ops = {
	.submit = submit,
	.cancel = take_back,
	.inquire = inquire,
};
static struct fetcher here = { .ops = &ops, .loop = &loop };

static void drop_event(const struct event *event, const char *text)
{
	(void)event;
	(void)text;
}

static struct request *request_of(struct run *run)
{
	return container_of(run, struct request, run);
}

static int space(struct run *run, struct iovec *parts, int room)
{
	struct request *request = request_of(run);

	(void)room;
	parts->iov_base = request->data + request->filled;
	parts->iov_len = run->length - request->filled;
	return 1;
}

static void take(struct run *run, size_t bytes)
{
	request_of(run)->filled += bytes;
}

static uint8_t *take_all(struct run *run, uint8_t *data)
{
	struct request *request = request_of(run);
	uint8_t *unused = request->data;

	request->data = data;
	return unused;
}

static void over(struct run *run)
{
	struct request *request = request_of(run);

	if (request->done)
		abort(); /* a mirror has to call this only once */
	request->done = true;
	/* Otherwise the loop would wait for whatever else there is in it. */
	if (!--running)
		uv_stop(&loop);
}

static const struct run_sink sink = {
	.space = space,
	.take = take,
	.take_all = take_all,
	.over = over,
};

static void print(json_t *object)
{
	json_dumpf(object, stdout, JSON_COMPACT | JSON_SORT_KEYS);
	json_decref(object);
	putchar('\n');
}

static void set_text(json_t *object, const char *key, const char *text)
{
	json_object_set_new(object, key, text ? json_string(text) : json_null());
}

static void print_fetch(const struct request *request)
{
	const struct run *run = &request->run;
	static const char *const failures[] = {
		[FETCH_TRANSIENT] = "transient", [FETCH_BUSY] = "busy",
		[FETCH_NO_LOGIN] = "no_login",	 [FETCH_DENIED] = "denied",
		[FETCH_GONE] = "gone",		 [FETCH_CHANGED] = "changed",
		[FETCH_WRONG] = "wrong",
	};
	json_t *object = json_pack("{s:i}", "result", run->result);

	if (run->result) {
		set_text(object, "failure", failures[run->failure]);
		set_text(object, "text", run->error.text);
		set_text(object, "hint", run->error.hint);
		json_object_set_new(object, "retry_after_ms", json_integer(run->retry_after_ms));
	} else {
		set_text(object, "identity", run->identity);
	}
	print(object);
	if (!run->result)
		fwrite(request->data, 1, run->length, stdout);
}

static void start(struct request *request, struct mirror *mirror, uint64_t offset, uint32_t length,
		  unsigned timeout_ms)
{
	*request = (struct request){
		.data = malloc(length),
		.run = {
			.sink = &sink,
			.fetcher = &here,
			.mirror = mirror,
			.offset = offset,
			.length = length,
			.deadline_ns = uv_hrtime() + (uint64_t)timeout_ms * 1000000,
		},
	};
	if (!request->data)
		abort();
	running++;
	mirror->ops->start(&request->run);
}

static void finish(struct request *request)
{
	print_fetch(request);
	free(request->data);
	free(request->run.identity);
}

static void fetch(struct mirror *mirror, uint64_t offset, uint32_t length, unsigned timeout_ms,
		  unsigned count)
{
	struct request *requests = calloc(count, sizeof(*requests));

	if (!requests)
		abort();
	for (unsigned i = 0; i < count; i++)
		start(&requests[i], mirror, offset + (uint64_t)i * length, length, timeout_ms);
	while (running)
		uv_run(&loop, UV_RUN_ONCE);
	for (unsigned i = 0; i < count; i++)
		finish(&requests[i]);
	free(requests);
}

static void on_timer(uv_timer_t *timer)
{
	struct request *request = timer->data;

	if (!request->done)
		request->run.mirror->ops->cancel(&request->run);
}

static void cancel(struct mirror *mirror, uint64_t offset, uint32_t length, unsigned after_ms)
{
	struct request request;
	uv_timer_t timer;

	start(&request, mirror, offset, length, 60000);
	uv_timer_init(&loop, &timer);
	timer.data = &request;
	uv_timer_start(&timer, on_timer, after_ms, 0);
	while (running)
		uv_run(&loop, UV_RUN_ONCE);
	uv_close((uv_handle_t *)&timer, NULL);
	uv_run(&loop, UV_RUN_NOWAIT);
	finish(&request);
}

static void probe(struct mirror *mirror, unsigned timeout_ms)
{
	struct error error = {};
	struct mirror_probe found = {};
	int err = mirror_probe(&here, mirror, timeout_ms, &found, &error);
	json_t *object = json_pack("{s:i}", "result", err);

	if (err) {
		set_text(object, "text", error.text);
		set_text(object, "hint", error.hint);
	} else {
		json_object_set_new(object, "size", json_integer((json_int_t)found.size));
		set_text(object, "identity", found.identity);
	}
	free(found.identity);
	print(object);
}

static bool answer(struct mirror *mirror, char *line)
{
	unsigned long long offset;
	unsigned length, timeout_ms, count;

	line[strcspn(line, "\n")] = 0;
	if (sscanf(line, "probe %u", &timeout_ms) == 1) {
		probe(mirror, timeout_ms);
	} else if (!strncmp(line, "pin ", 4)) {
		free(mirror->identity);
		mirror->identity = strdup(line + 4);
		print(json_object());
	} else if (sscanf(line, "fetch %llu %u %u %u", &offset, &length, &timeout_ms, &count) ==
		   4) {
		fetch(mirror, offset, length, timeout_ms, count);
	} else if (sscanf(line, "cancel %llu %u %u", &offset, &length, &timeout_ms) == 3) {
		cancel(mirror, offset, length, timeout_ms);
	} else {
		return false;
	}
	fflush(stdout);
	return true;
}

static void close_all(void)
{
	here.ending = true;
	while (here.logins)
		uv_run(&loop, UV_RUN_ONCE);
	attachments_close(&here);
	uv_run(&loop, UV_RUN_DEFAULT);
	/* This fails if anything is still open. */
	if (uv_loop_close(&loop))
		abort();
}

int main(int argc, char **argv)
{
	struct error error = {};
	struct source *source = NULL;
	json_error_t json_error;
	json_t *text;
	char line[1024];
	int status = EXIT_OK;

	message_init("mirror-shell");
	text = argc == 2 ? json_load_file(argv[1], 0, &json_error) : NULL;
	if (!text) {
		msg_error("usage: mirror-shell SOURCE.json");
		return EXIT_USAGE;
	}
	if (source_parse(text, &source, &error)) {
		msg_error("%s", error.text);
		if (error.hint[0])
			msg_hint("%s", error.hint);
		json_decref(text);
		return EXIT_USAGE;
	}
	json_decref(text);
	event_send_to(drop_event);
	uv_loop_init(&loop);
	while (status == EXIT_OK && fgets(line, sizeof(line), stdin)) {
		if (!answer(&source->mirrors[0], line))
			status = EXIT_USAGE;
	}
	close_all();
	source_free(source);
	return status;
}
