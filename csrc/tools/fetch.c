/* SPDX-License-Identifier: MIT */
/*
 * btrfs-ublk-fetch: asks servers for a block server, and has no privileges. Only a server starts it;
 * fetch/process/front.c is the other end of its stream. What it brings is verified there.
 *
 * This program has a fetcher without units, map and cache.
 */
#include <errno.h>
#include <malloc.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>
#include <uv.h>

#include "base/confine_process.h"
#include "base/fileio.h"
#include "base/json_text.h"
#include "base/keys.h"
#include "base/message.h"
#include "fetch/attachment.h"
#include "fetch/event.h"
#include "fetch/fetcher_ops.h"
#include "fetch/inquiry.h"
#include "fetch/mirror/object.h"
#include "fetch/mirror/remote.h"
#include "fetch/process/channel.h"
#include "fetch/process/login_text.h"
#include "fetch/run.h"
#include "fetch/transfer.h"

/* As many as the server reads logins at a time. */
enum {
	WORKERS = 8,
	BODY_MAX_BYTES = 8 << 20,
	/* The server is told at once of so many bytes, or that all are there; of less, soon. */
	TELL_BYTES = 32 << 10,
	TELL_MS = 2,
	TELL_PROGRESS_MS = 100, /* the same of something that has no bytes */
};

/* A mirror of the server's, or a cache in front of one. */
struct known {
	struct source source;
	struct mirror mirror;
	struct mirror *origin;
	char *via, *identity;
};

/* An inquiry, with its mirror. */
struct question {
	struct inquiry inquiry;
	struct known known;
	char *name;
	unsigned slot;
	struct link link; /* in `answered_questions` */
};

struct task {
	struct run run;
	bool active;
	uint32_t arrived, taken, told;
	unsigned progress_told;
	bool named; /* the server has been told of identity and node */
};

/* A worker waits for the server's answer. */
struct login_request {
	struct link link;
	struct channel_ask ask;
	struct login *login;
	struct error *error;
	int err;
	bool asked, done;
};

static uv_loop_t loop;
static struct worker_pool workers;
static bool workers_run;
static struct channel channel;
static uint8_t *windows;
static struct task tasks[CHANNEL_SLOTS];
static unsigned highest_task; /* no task above it was ever active */
static struct known **known;
static unsigned known_count;
static uv_poll_t stream;
static bool waits_to_send;
static uv_timer_t tell_timer;
static bool tells_all; /* it has expired */
static struct link answered_questions;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* for requests */
static pthread_cond_t answered = PTHREAD_COND_INITIALIZER;
static struct link requests;
static uv_async_t requests_wake, jobs_wake;
static struct message_queue jobs_done;

/* It has no reason to be without its server. */
static void leave(void) __attribute__((noreturn));

static void leave(void)
{
	_exit(EXIT_OK);
}

/* What kinds of mirrors use of a fetcher. */

static void job_finished(struct worker_pool *pool, struct pool_job *job)
{
	if (message_queue_put(&jobs_done, &job->ended.message))
		uv_async_send(&jobs_wake);
}

static void on_jobs(uv_async_t *wake)
{
	struct message *message = message_queue_take(&jobs_done);

	while (message) {
		struct pool_job *job = container_of(message, struct pool_job, ended.message);

		message = message->next;
		job->done(job);
	}
}

static void submit(struct fetcher *fetcher, struct pool_job *job)
{
	/* Fewer do as well, where their number is limited. */
	for (unsigned count = WORKERS; !workers_run; count /= 2) {
		if (!count)
			leave(); /* a new one may have more luck */
		workers_run = !worker_pool_start(&workers, count);
	}
	worker_pool_submit(&workers, job);
}

static bool cancel(struct fetcher *fetcher, struct pool_job *job)
{
	return worker_pool_cancel(&workers, job);
}

static const struct fetcher_ops fetcher_ops = { .submit = submit, .cancel = cancel };
static struct fetcher here = { .ops = &fetcher_ops, .loop = &loop };

/* The log is the server's. */
static void send_event(const struct event *event, const char *text)
{
	const char *const texts[] = { event->name, text, NULL };

	channel_add(&channel, CHANNEL_EVENT, 0, NULL, 0, texts);
}

/* Runs. */

static struct task *task_of(struct run *run)
{
	return container_of(run, struct task, run);
}

static unsigned slot_of(const struct task *task)
{
	return (unsigned)(task - tasks);
}

static int space(struct run *run, struct iovec *parts, int room)
{
	const struct task *task = task_of(run);
	uint8_t *window = windows + slot_of(task) * (size_t)CHANNEL_WINDOW_BYTES;
	uint32_t at = task->arrived % CHANNEL_WINDOW_BYTES;
	uint32_t bytes = CHANNEL_WINDOW_BYTES - (task->arrived - task->taken);

	if (bytes > run->length - task->arrived)
		bytes = run->length - task->arrived;
	if (!bytes)
		return 0;
	parts[0].iov_base = window + at;
	parts[0].iov_len = bytes;
	if (bytes <= CHANNEL_WINDOW_BYTES - at)
		return 1;
	parts[0].iov_len = CHANNEL_WINDOW_BYTES - at;
	if (room < 2)
		return 1;
	parts[1].iov_base = window;
	parts[1].iov_len = bytes - parts[0].iov_len;
	return 2;
}

static void take(struct run *run, size_t bytes)
{
	task_of(run)->arrived += (uint32_t)bytes;
}

static void tell_names(struct task *task)
{
	const char *const texts[] = { task->run.identity, NULL };

	if (!task->named && !task->told && task->run.identity)
		channel_add(&channel, CHANNEL_IDENTITY, slot_of(task), NULL, 0, texts);
	task->named = true;
}

static void over(struct run *run)
{
	struct task *task = task_of(run);
	const struct channel_over body = {
		.result = run->result,
		.failure = run->failure,
		.retry_after_ms = run->retry_after_ms,
		.arrived = task->arrived,
		.cut = run->cut,
		.unsized = run->unsized,
		.whole = run->whole,
	};
	const char *const texts[] = { run->error.text, NULL };

	tell_names(task);
	if (channel_add(&channel, CHANNEL_OVER, slot_of(task), &body, sizeof(body), texts))
		leave();
	free(run->identity);
	run->identity = NULL;
	task->active = false;
}

static void widen(struct run *run)
{
	run->offset = 0;
	run->length = (uint32_t)run->mirror->source->object_bytes;
	channel_add(&channel, CHANNEL_WHOLE, slot_of(task_of(run)), NULL, 0, NULL);
}

static const struct run_sink sink = {
	.space = space,
	.take = take,
	.widen = widen,
	.over = over,
};

/* Questions. */

static void forget_question(struct question *question)
{
	struct mirror *mirror = &question->known.mirror;

	if (mirror->ops)
		mirror->ops->close(mirror);
	free(mirror->private);
	free(question->inquiry.found.identity);
	free(question->inquiry.text);
	free(question->name);
	free(question);
}

static void answer_question(struct question *question)
{
	const struct inquiry *inquiry = &question->inquiry;
	const struct channel_answer body = { .size = inquiry->found.size,
					     .result = inquiry->result };
	const char *const texts[] = { inquiry->error.text, inquiry->error.hint,
				      inquiry->found.identity ?: "", inquiry->text ?: "", NULL };

	if (channel_add(&channel, CHANNEL_ANSWER, question->slot, &body, sizeof(body), texts))
		leave();
	forget_question(question);
}

/* The kind may still use the mirror, so the rest is done before the loop waits. */
static void question_answered(struct inquiry *inquiry)
{
	list_append(&answered_questions, &container_of(inquiry, struct question, inquiry)->link);
}

static void answer_questions(void)
{
	struct link *link;

	while ((link = list_first(&answered_questions))) {
		list_remove(link);
		answer_question(container_of(link, struct question, link));
	}
}

static void on_tell_timer(uv_timer_t *timer)
{
	tells_all = true;
}

/* How soon this process tells the server of what has arrived. */
static unsigned tell_in_ms(const struct task *task)
{
	if (tells_all || task->arrived - task->told >= TELL_BYTES)
		return 0;
	return task->arrived == task->told ? TELL_PROGRESS_MS : TELL_MS;
}

/*
 * Says what has arrived, if that is much, and sends all that there is to say. Each message wakes the
 * server, where mostly the end follows at once.
 */
static void flush(void)
{
	unsigned least_ms = UINT_MAX;
	int err;

	answer_questions();
	for (unsigned i = 0; i < highest_task; i++) {
		struct task *task = &tasks[i];
		unsigned in_ms;

		if (!task->active ||
		    (task->told == task->arrived && task->progress_told == task->run.progress))
			continue;
		in_ms = tell_in_ms(task);
		if (in_ms) {
			least_ms = in_ms < least_ms ? in_ms : least_ms;
			continue;
		}
		if (task->arrived)
			tell_names(task);
		task->told = task->arrived;
		task->progress_told = task->run.progress;
		channel_add(&channel, CHANNEL_ARRIVED, i, &task->arrived, sizeof(task->arrived),
			    NULL);
	}
	tells_all = false;
	if (least_ms < UINT_MAX && (!uv_is_active((uv_handle_t *)&tell_timer) ||
				    uv_timer_get_due_in(&tell_timer) > least_ms))
		uv_timer_start(&tell_timer, on_tell_timer, least_ms, 0);
	err = channel_flush(&channel);
	if (err && err != -EAGAIN)
		leave();
	if ((err == -EAGAIN) != waits_to_send) {
		waits_to_send = err == -EAGAIN;
		uv_poll_start(&stream, UV_READABLE | (waits_to_send ? UV_WRITABLE : 0),
			      stream.poll_cb);
	}
}

static void on_waited(uv_check_t *check)
{
	flush();
}

static void before_wait(uv_prepare_t *prepare)
{
	flush();
}

static void set_identity(struct mirror *mirror, const char *identity)
{
	if (!*identity || (mirror->identity && !strcmp(mirror->identity, identity)))
		return;
	free(mirror->identity);
	mirror->identity = strdup(identity);
}

/* The server is believed: it could do all of this itself. */

static void start_run(unsigned slot, const uint8_t *body, size_t bytes)
{
	const uint8_t *end = body + bytes;
	struct task *task = &tasks[slot];
	struct channel_start start;
	const char *identity;

	memcpy(&start, body, sizeof(start));
	body += sizeof(start);
	identity = channel_text(&body, end);
	if (!identity || start.mirror >= known_count || task->active)
		leave();
	*task = (struct task){
		.active = true,
		.run = { .sink = &sink,
			 .fetcher = &here,
			 .mirror = &known[start.mirror]->mirror,
			 .offset = start.offset,
			 .length = start.length,
			 .deadline_ns = start.deadline_ns,
			 .fresh = start.fresh,
			 .sized = start.sized,
			 .widens = start.widens },
	};
	if (slot >= highest_task)
		highest_task = slot + 1;
	set_identity(mirror_object(task->run.mirror), identity);
	if (task->run.mirror->ops)
		task->run.mirror->ops->start(&task->run);
	else
		run_failed(&task->run, FETCH_WRONG,
			   error_set(&task->run.error, -EINVAL, "the fetch process cannot ask it"));
}

static void go_on(struct task *task, const uint8_t *body)
{
	bool was_full = task->arrived - task->taken == CHANNEL_WINDOW_BYTES;

	memcpy(&task->taken, body, sizeof(task->taken));
	if (was_full)
		task->run.mirror->ops->resume(&task->run);
}

/* What cannot be parsed was parsed by the server, so only memory can lack. */
static void parse_mirror(struct known *made, uint32_t number, const char *kind, const char *text)
{
	json_t *keys = json_text_parse(text, strlen(text), 0, NULL);
	const struct mirror_ops *ops = mirror_kind_find(kind);
	struct mirror *mirror = &made->mirror;
	struct error error = {};

	if (ops && keys) {
		mirror->private = calloc(1, ops->private_bytes);
		if (mirror->private && !ops->parse(mirror, keys, &error)) {
			mirror->ops = ops;
			((struct remote *)mirror->private)->number = number;
		}
	}
	json_decref(keys);
}

static void add_mirror(const uint8_t *body, size_t bytes)
{
	const uint8_t *end = body + bytes;
	struct known *made = calloc(1, sizeof(*made));
	struct channel_mirror head;
	const char *kind, *via, *text;

	memcpy(&head, body, sizeof(head));
	body += sizeof(head);
	kind = channel_text(&body, end);
	via = channel_text(&body, end);
	text = channel_text(&body, end);
	if (head.number >= known_count) {
		known = realloc(known, (head.number + 1) * sizeof(struct known *));
		for (; known && known_count <= head.number; known_count++)
			known[known_count] = NULL;
	}
	if (!made || !known || !text || known[head.number] || head.origin >= (int64_t)known_count)
		leave();
	known[head.number] = made;
	made->source.object_bytes = head.object_bytes;
	made->source.has_digests = head.has_digests;
	made->mirror.source = &made->source;
	if (head.origin == CHANNEL_NO_MIRROR) {
		parse_mirror(made, head.number, kind, text);
		return;
	}
	made->via = strdup(via);
	made->mirror.via = made->via;
	made->mirror.origin = &known[head.origin]->mirror;
	made->mirror.ops = made->mirror.origin->ops;
	made->mirror.private = made->mirror.origin->private;
	if (!made->via)
		leave();
}

static void inquire(unsigned slot, const uint8_t *body, size_t bytes)
{
	const uint8_t *end = body + bytes;
	struct question *made = calloc(1, sizeof(*made));
	struct channel_inquire head;
	const char *kind, *text, *name;

	memcpy(&head, body, sizeof(head));
	body += sizeof(head);
	kind = channel_text(&body, end);
	text = channel_text(&body, end);
	name = channel_text(&body, end);
	if (!made || !name)
		leave();
	made->slot = slot;
	made->name = strdup(name);
	made->known.mirror.source = &made->known.source;
	parse_mirror(&made->known, CHANNEL_OF_INQUIRY | slot, kind, text);
	made->inquiry.fetcher = &here;
	made->inquiry.mirror = &made->known.mirror;
	made->inquiry.name = *name ? made->name : NULL;
	made->inquiry.deadline_ns = head.deadline_ns;
	made->inquiry.done = question_answered;
	if (made->name && made->known.mirror.ops)
		made->known.mirror.ops->inquire(&made->inquiry);
	else
		inquiry_failed(&made->inquiry, -EINVAL, "the fetch process cannot ask it");
}

/* Logins. */

/* Called on a worker, in the place of reading files. */
static int ask_server(struct remote *remote, struct login *login, struct error *error)
{
	struct login_request request = { .login = login, .error = error };

	request.ask.mirror = remote->number;
	pthread_mutex_lock(&remote->lock);
	request.ask.refused = remote->refused;
	request.ask.token_refused = remote->token_refused;
	request.ask.wants_token = remote->wants_token;
	remote->refused = false;
	pthread_mutex_unlock(&remote->lock);
	pthread_mutex_lock(&lock);
	list_append(&requests, &request.link);
	uv_async_send(&requests_wake);
	while (!request.done)
		pthread_cond_wait(&answered, &lock);
	pthread_mutex_unlock(&lock);
	if (!request.err)
		login_trust(remote, login);
	return request.err;
}

/* What is wrong with it, the server would end us for. */
static void tell_token(struct fetcher *fetcher, struct remote *remote, const char *token,
		       const char *why, bool refused, uint64_t until_ns)
{
	const struct channel_token body = { until_ns, remote->number, refused };
	const char *const texts[] = { token ?: "", why ?: "", NULL };

	for (const char *c = texts[0]; *c; c++) {
		if (*c <= ' ' || *c == 127)
			return;
	}
	if (remote->wants_token)
		channel_add(&channel, CHANNEL_TOKEN, 0, &body, sizeof(body), texts);
}

static void on_requests(uv_async_t *wake)
{
	pthread_mutex_lock(&lock);
	list_for_each (struct login_request, request, &requests, link) {
		if (!request->asked)
			channel_add(&channel, CHANNEL_ASK_LOGIN, 0, &request->ask,
				    sizeof(request->ask), NULL);
		request->asked = true;
	}
	pthread_mutex_unlock(&lock);
}

static void answer(struct login_request *request, int err, const struct error *error,
		   const uint8_t *data, size_t bytes)
{
	request->err = err;
	if (err)
		*request->error = *error;
	else if (login_unpack(data, bytes, request->login))
		request->err = error_set(request->error, -ENOMEM, "no memory for credentials");
	request->done = true;
}

static void take_login(const uint8_t *body, size_t bytes)
{
	const uint8_t *end = body + bytes;
	struct channel_login head;
	struct error error = {};
	const char *text, *hint;

	memcpy(&head, body, sizeof(head));
	body += sizeof(head);
	text = channel_text(&body, end);
	hint = text ? channel_text(&body, end) : NULL;
	if (!hint)
		leave();
	error_set_text(&error, "%s", text);
	error_set_hint(&error, "%s", hint);
	pthread_mutex_lock(&lock);
	list_for_each (struct login_request, request, &requests, link) {
		if (request->ask.mirror != head.mirror)
			continue;
		list_remove(&request->link);
		answer(request, head.err, &error, body, (size_t)(end - body));
		break;
	}
	pthread_cond_broadcast(&answered);
	pthread_mutex_unlock(&lock);
}

static void take_message(const struct channel_head *head, const uint8_t *body)
{
	static const size_t least[] = {
		[CHANNEL_MIRROR] = sizeof(struct channel_mirror),
		[CHANNEL_START] = sizeof(struct channel_start),
		[CHANNEL_TAKEN] = sizeof(uint32_t),
		[CHANNEL_LOGIN] = sizeof(struct channel_login),
		[CHANNEL_INQUIRE] = sizeof(struct channel_inquire),
		[CHANNEL_PING] = 0,
	};
	struct task *task = &tasks[head->slot % CHANNEL_SLOTS];

	if (head->op > CHANNEL_PING || head->bytes < least[head->op])
		leave();
	switch ((enum channel_op)head->op) {
	case CHANNEL_MIRROR:
		add_mirror(body, head->bytes);
		break;
	case CHANNEL_START:
		start_run(head->slot % CHANNEL_SLOTS, body, head->bytes);
		break;
	case CHANNEL_CANCEL:
		/* It may be over already. */
		if (task->active && task->run.mirror->ops)
			task->run.mirror->ops->cancel(&task->run);
		break;
	case CHANNEL_TAKEN:
		if (task->active)
			go_on(task, body);
		break;
	case CHANNEL_LOGIN:
		take_login(body, head->bytes);
		break;
	case CHANNEL_INQUIRE:
		inquire(head->slot, body, head->bytes);
		break;
	default:
		channel_add(&channel, CHANNEL_PONG, 0, NULL, 0, NULL);
	}
}

static void on_stream(uv_poll_t *poll, int status, int events)
{
	struct channel_head head;
	const uint8_t *body;
	int err = status < 0 ? status : 0;

	if (!err && events & UV_READABLE)
		err = channel_receive(&channel);
	if (err && err != -EAGAIN)
		leave();
	while ((err = channel_next(&channel, &head, &body)) > 0)
		take_message(&head, body);
	if (err)
		leave();
}

/* The beginning. */

/* Without these, fetching waits for memory that may have to be written to what is read from it. */
static bool stay_in_memory(void)
{
	const struct rlimit all = { RLIM_INFINITY, RLIM_INFINITY };

	prctl(PR_SET_IO_FLUSHER, 1, 0, 0, 0);
	/* NB: memory that is locked later counts as well, and this process loses its privileges. */
	return !setrlimit(RLIMIT_MEMLOCK, &all) &&
	       !mlockall(MCL_CURRENT | MCL_FUTURE | MCL_ONFAULT);
}

static int open_windows(void)
{
	windows = mmap(NULL, CHANNEL_WINDOWS_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED,
		       CHANNEL_WINDOWS_FD, 0);
	/* NB: without the descriptor, it can never be mapped as a program. */
	close(CHANNEL_WINDOWS_FD);
	close(CHANNEL_PROGRAM_FD);
	return windows == MAP_FAILED ? -errno : 0;
}

static int init_loop(void)
{
	static uv_check_t check;
	static uv_prepare_t prepare;
	int err = uv_loop_init(&loop);

	if (!err)
		err = uv_poll_init(&loop, &stream, CHANNEL_FD);
	if (!err)
		err = uv_poll_start(&stream, UV_READABLE, on_stream);
	if (!err)
		err = uv_timer_init(&loop, &tell_timer);
	if (!err)
		err = uv_async_init(&loop, &requests_wake, on_requests);
	if (!err)
		err = uv_async_init(&loop, &jobs_wake, on_jobs);
	if (err)
		return err;
	uv_check_init(&loop, &check);
	uv_check_start(&check, on_waited);
	uv_prepare_init(&loop, &prepare);
	uv_prepare_start(&prepare, before_wait);
	return 0;
}

/*
 * For those who want to know before there is a server: what this machine lacks, by name. A process
 * that is confined may not write to a file, so a child is, and says what it lacks as its status.
 */
static int say_what_lacks(void)
{
	pid_t child = fork();
	int status;

	if (!child) {
		unsigned lacks = stay_in_memory() ? 0 : CHANNEL_LACKS_LOCK;

		_exit((int)(lacks | confine_process()));
	}
	if (child < 0 || waitpid(child, &status, 0) != child || !WIFEXITED(status))
		return msg_fail(EXIT_FAILED, "cannot try what a confined process may do here");
	for (unsigned i = 0; i < CHANNEL_LACKS; i++) {
		if (WEXITSTATUS(status) & 1 << i)
			puts(channel_lack_names[i]);
	}
	if (!fflush(stdout))
		return EXIT_OK;
	return msg_fail(EXIT_FAILED, "cannot say what is lacking: %s", strerror(errno));
}

int main(int argc, char **argv)
{
	struct channel_hello hello = { .version = CHANNEL_VERSION };

	message_init("btrfs-ublk-fetch");
	if (argc == 2 && !strcmp(argv[1], "--version"))
		return print_version();
	if (argc == 2 && !strcmp(argv[1], "--check"))
		return say_what_lacks();
	if (argc != 1 || open_windows())
		return msg_fail(EXIT_USAGE, "only btrfs-ublk-server starts this program");
	signal(SIGPIPE, SIG_IGN); /* TLS writes where a server has closed */
	mallopt(M_ARENA_MAX, 1);
	secret_guard_json();
	prctl(PR_SET_NAME, "btrfs-ublk-fetch", 0, 0, 0);
	list_init(&requests);
	list_init(&answered_questions);
	lazy_small_stacks();
	if (!stay_in_memory())
		hello.lacks |= CHANNEL_LACKS_LOCK;
	event_send_to(send_event);
	transfer_init();
	remote_hooks = (struct remote_hooks){ .read = ask_server, .tell = tell_token };
	workers.finished = job_finished;
	workers.name = "fetch-worker";
	workers.role = CONFINE_INHERITED;
	channel_init(&channel, CHANNEL_FD, BODY_MAX_BYTES);
	hello.lacks |= confine_process();
	if (init_loop() || channel_add(&channel, CHANNEL_HELLO, 0, &hello, sizeof(hello), NULL))
		return EXIT_FAILED;
	flush();
	uv_run(&loop, UV_RUN_DEFAULT);
	return EXIT_FAILED;
}
