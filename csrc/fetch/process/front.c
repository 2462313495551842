/* SPDX-License-Identifier: MIT */
#include "fetch/process/front.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/array.h"
#include "base/confine_process.h"
#include "base/relaxed.h"
#include "base/utf8.h"
#include "content/identity.h"
#include "fetch/event.h"
#include "fetch/mirror/object.h"
#include "fetch/mirror/remote.h"
#include "fetch/process/internal.h"
#include "fetch/process/login_text.h"

enum {
	LOGINS_MAX = 8, /* that are read at a time */
	PARTS = 8,
	/* What is copied is hashed while it is still in the CPU's cache. */
	DRAIN_BYTES = 64 << 10,
	TOKEN_LIFE_MAX_S = 86400,
};

struct login_job {
	struct pool_job job;
	struct front *front;
	unsigned number;
	struct remote *remote;
	struct channel_ask ask;
	char token_key[TOKEN_KEY_BYTES];
	struct secret text;
	struct error error;
	int err;
};

/* Slots. */

void slot_free(struct slot *slot)
{
	timer_clear(&slot->deadline);
	slot->run = NULL;
	slot->sent = slot->over = false;
	slot->length = 0;
	slot->front->busy--;
	slot->front->busy_ns = clock_now_ns();
}

/* The core gets its run back. The process may still have the slot. */
struct run *slot_leave(struct slot *slot)
{
	struct run *run = slot->run;

	timer_clear(&slot->deadline);
	slot->run = NULL;
	run->private = NULL;
	if (!slot->sent || slot->over)
		slot_free(slot);
	return run;
}

static void finish(struct slot *slot)
{
	struct run *run = slot_leave(slot);

	run->sink->over(run);
}

/* Messages to the process. */

static int tell(struct front *front, enum channel_op op, unsigned slot, const void *body,
		size_t bytes, const char *const texts[])
{
	return channel_add(&front->channel, op, slot, body, bytes, texts);
}

static unsigned number_of(const struct slot *slot)
{
	return (unsigned)(slot - slot->front->slots);
}

static int know(struct front *front, struct mirror *mirror)
{
	if (mirror->known)
		return 0;
	if (array_reserve(front->known, front->known_room, front->known_count + 1))
		return -ENOMEM;
	front->known[front->known_count++] = (struct known){ .mirror = mirror };
	mirror->known = front->known_count;
	return 0;
}

static int tell_mirror(struct front *front, struct mirror *mirror)
{
	const struct remote *remote = mirror->private;
	const char *const texts[] = { mirror->ops->name, mirror->via ?: "", remote->keys, NULL };
	struct channel_mirror body = { .object_bytes = mirror->source->object_bytes,
				       .origin = CHANNEL_NO_MIRROR,
				       .has_digests = mirror->source->has_digests };
	int err = know(front, mirror);

	if (err || front->known[mirror->known - 1].told)
		return err;
	if (mirror->origin) {
		err = tell_mirror(front, mirror->origin);
		body.origin = (int32_t)mirror->origin->known - 1;
	}
	body.number = mirror->known - 1;
	if (!err)
		err = tell(front, CHANNEL_MIRROR, 0, &body, sizeof(body), texts);
	front->known[mirror->known - 1].told = !err;
	return err;
}

/* What was before that is no answer's time. */
static void run_goes_out(struct run *run)
{
	if (run->held)
		run->began_ns = clock_now_ns();
	run->held = false;
}

static void send_run(struct slot *slot)
{
	struct front *front = slot->front;
	struct run *run = slot->run;
	const char *const texts[] = { mirror_object(run->mirror)->identity ?: "", NULL };
	int err = tell_mirror(front, run->mirror);
	const struct channel_start body = {
		.offset = run->offset,
		.deadline_ns = run->deadline_ns,
		.mirror = run->mirror->known - 1,
		.length = run->length,
		.fresh = run->fresh,
		.sized = run->sized,
		.widens = run->widens,
	};

	if (!err)
		err = tell(front, CHANNEL_START, number_of(slot), &body, sizeof(body), texts);
	if (err) {
		run = slot_leave(slot);
		run->local_failure = true;
		run_lacks_memory(run);
		return;
	}
	slot->sent = true;
	if (front->greeted)
		run_goes_out(run);
}

void front_send_all(struct front *front)
{
	for (unsigned i = 0; i < CHANNEL_SLOTS; i++) {
		if (front->slots[i].run && !front->slots[i].sent)
			send_run(&front->slots[i]);
	}
	questions_send(front);
	life_flush(front);
}

static void take_back(struct slot *slot)
{
	if (slot->sent && !slot->over && slot->front->state == STATE_UP &&
	    !tell(slot->front, CHANNEL_CANCEL, number_of(slot), NULL, 0, NULL))
		life_flush(slot->front);
}

/* Neither has the process said anything, nor has the core cancelled it. */
static void on_deadline(struct timer *timer)
{
	struct slot *slot = container_of(timer, struct slot, deadline);
	bool sent = slot->sent;
	struct run *run;

	take_back(slot);
	run = slot_leave(slot);
	run->local_failure = !sent;
	run_failed(run, FETCH_TRANSIENT,
		   error_set(&run->error, -ETIMEDOUT, "%s",
			     sent ? "not done in time: the fetch process says nothing" :
				    "not done in time: the fetch process has not started yet"));
}

/* What arrives. */

/*
 * Copies what has arrived to where it belongs. NB: the process may change it at any time, so only
 * the copy is looked at.
 */
static void drain(struct slot *slot)
{
	const uint8_t *window =
		slot->front->process.windows + number_of(slot) * (size_t)CHANNEL_WINDOW_BYTES;
	struct run *run = slot->run;
	struct iovec parts[PARTS];

	while (slot->taken < slot->arrived) {
		uint32_t at = slot->taken % CHANNEL_WINDOW_BYTES;
		uint32_t most = slot->arrived - slot->taken, copied = 0;
		int count = run->sink->space(run, parts, PARTS);

		if (!count)
			return; /* resume() follows */
		if (most > CHANNEL_WINDOW_BYTES - at)
			most = CHANNEL_WINDOW_BYTES - at;
		if (most > DRAIN_BYTES)
			most = DRAIN_BYTES;
		for (int i = 0; i < count && copied < most; i++) {
			size_t bytes = most - copied;

			if (bytes > parts[i].iov_len)
				bytes = parts[i].iov_len;
			memcpy(parts[i].iov_base, window + at + copied, bytes);
			copied += (uint32_t)bytes;
		}
		slot->taken += copied;
		run->sink->take(run, copied);
	}
	if (slot->over)
		finish(slot);
}

static void say_taken(struct slot *slot)
{
	if (slot->over || slot->taken == slot->length ||
	    slot->taken - slot->told < CHANNEL_WINDOW_BYTES / 4)
		return;
	if (!tell(slot->front, CHANNEL_TAKEN, number_of(slot), &slot->taken, sizeof(slot->taken),
		  NULL))
		slot->told = slot->taken;
}

bool front_is_plain(const char *text)
{
	return *text && strlen(text) < IDENTITY_BYTES && text_is_plain(text);
}

/* These return false where a genuine fetch process would not say that. */

static bool take_identity(struct slot *slot, const uint8_t *body, size_t bytes)
{
	const char *text = channel_text(&body, body + bytes);
	struct run *run = slot->run;

	if (!text || !front_is_plain(text) || slot->arrived)
		return false;
	if (!run)
		return true;
	if (run->identity || run->mirror->via || run->mirror->ops->immutable)
		return false;
	run->identity = strdup(text);
	return run->identity;
}

/* NB: all that is sent then is of a size that the run's source has. */
static bool take_whole(struct slot *slot)
{
	struct run *run = slot->run;

	if (slot->arrived || !slot->widens)
		return false;
	slot->widens = false;
	slot->length = (uint32_t)slot->object_bytes;
	if (run) {
		run->whole = true;
		run->sink->widen(run);
	}
	return true;
}

static bool has_arrived(struct slot *slot, uint32_t arrived)
{
	if (arrived < slot->arrived || arrived > slot->length ||
	    (slot->run && arrived - slot->taken > CHANNEL_WINDOW_BYTES))
		return false;
	slot->arrived = arrived;
	if (slot->run)
		slot->run->progress++;
	return true;
}

static bool take_over(struct slot *slot, const uint8_t *body, size_t bytes)
{
	const uint8_t *end = body + bytes;
	struct run *run = slot->run;
	struct channel_over over;
	const char *text;

	if (bytes < sizeof(over))
		return false;
	memcpy(&over, body, sizeof(over));
	body += sizeof(over);
	text = channel_text(&body, end);
	if (!text || over.failure > FETCH_WRONG || over.result > 0 ||
	    over.result < -FRONT_ERRNO_MAX || !has_arrived(slot, over.arrived) ||
	    (!over.result && over.arrived != slot->length))
		return false;
	slot->over = true;
	if (!run) {
		slot_free(slot);
		return true;
	}
	run->result = over.result;
	run->failure = (enum fetch_failure)over.failure;
	run->retry_after_ms = over.retry_after_ms;
	run->cut = over.cut;
	run->unsized = over.unsized && run->sized;
	run->whole = over.whole;
	if (over.result)
		error_set_text(&run->error, "%s", text);
	drain(slot);
	return true;
}

/* Logins. */

static void read_login(struct pool_job *job)
{
	struct login_job *login_job = container_of(job, struct login_job, job);
	struct login *login = NULL;

	if (login_job->ask.refused)
		login_is_refused(login_job->remote, login_job->ask.token_refused);
	pthread_mutex_lock(&login_job->remote->lock);
	login_job->remote->wants_token = login_job->ask.wants_token;
	pthread_mutex_unlock(&login_job->remote->lock);
	login_job->err = login_read(login_job->remote, &login, &login_job->error);
	if (login_job->err)
		return;
	login_job->err = login_pack(login, &login_job->text);
	if (login_job->err)
		error_set_text(&login_job->error, "credentials are too large");
	pthread_mutex_lock(&login_job->remote->lock);
	memcpy(login_job->token_key, login_job->remote->token_key, TOKEN_KEY_BYTES);
	pthread_mutex_unlock(&login_job->remote->lock);
	login_put(login_job->remote, login);
}

/* Of a mirror that the process has; or NULL. */
static struct wanted_login *login_of(struct front *front, uint32_t number, struct mirror **mirror)
{
	uint32_t slot = number & ~CHANNEL_OF_INQUIRY;

	if (number & CHANNEL_OF_INQUIRY) {
		if (slot >= front->question_count || !front->questions[slot].sent)
			return NULL;
		*mirror = front->questions[slot].inquiry ? front->questions[slot].inquiry->mirror :
							   NULL;
		return &front->questions[slot].login;
	}
	if (number >= front->known_count || !front->known[number].told)
		return NULL;
	*mirror = front->known[number].mirror;
	return &front->known[number].login;
}

static void send_login(struct front *front, uint32_t number, int err, const struct error *error,
		       const struct secret *text)
{
	const struct channel_login body = { number, err };
	const char *const texts[] = { error->text, error->hint, NULL };

	front->logins_sent++;
	if (channel_add_data(&front->channel, CHANNEL_LOGIN, 0, &body, sizeof(body), texts,
			     text ? text->text : NULL, text ? text->length : 0))
		life_end(front, "no memory for credentials");
	else
		life_flush(front);
}

static void login_is_read(struct pool_job *job)
{
	struct login_job *login_job = container_of(job, struct login_job, job);
	struct front *front = login_job->front;
	uint32_t number = login_job->number, slot = number & ~CHANNEL_OF_INQUIRY;
	struct question *question = number & CHANNEL_OF_INQUIRY ? &front->questions[slot] : NULL;
	struct wanted_login *login = question ? &question->login : &front->known[number].login;
	bool wanted = login->wanted;

	front->logins -= wanted;
	*login = (struct wanted_login){};
	memcpy(login->token_key, login_job->token_key, TOKEN_KEY_BYTES);
	if (wanted)
		send_login(front, number, login_job->err, &login_job->error, &login_job->text);
	if (question)
		question_settle(question);
	secret_clear(&login_job->text);
	free(login_job);
}

static bool read_for(struct front *front, const struct channel_ask *ask, struct remote *remote)
{
	struct login_job *job = calloc(1, sizeof(*job));

	if (!job)
		return false;
	job->front = front;
	job->number = ask->mirror;
	job->remote = remote;
	job->ask = *ask;
	job->job.work = read_login;
	job->job.done = login_is_read;
	front->fetcher->ops->submit(front->fetcher, &job->job);
	return true;
}

/* Only of mirrors that it has, and once at a time. */
static bool ask_login(struct front *front, const uint8_t *body, size_t bytes)
{
	struct wanted_login *login;
	struct channel_ask ask;
	struct mirror *mirror;

	if (bytes != sizeof(ask))
		return false;
	memcpy(&ask, body, sizeof(ask));
	login = login_of(front, ask.mirror, &mirror);
	if (!login || login->wanted || front->logins == LOGINS_MAX)
		return false;
	if (!mirror) {
		send_login(front, ask.mirror, -ECANCELED,
			   &(struct error){ .text = "nobody waits for it" }, NULL);
		return true;
	}
	if (!login->reading && !read_for(front, &ask, mirror->private))
		return false;
	login->reading = login->wanted = true;
	front->logins++;
	return true;
}

/*
 * It is kept under what the server knows of the mirror: the process cannot give it to another one.
 */
static bool take_token(struct front *front, const uint8_t *body, size_t bytes)
{
	const uint8_t *end = body + bytes;
	struct channel_token head;
	struct wanted_login *login;
	struct mirror *unused;
	const char *text, *why;
	uint64_t most_ns = clock_now_ns() + TOKEN_LIFE_MAX_S * NS_PER_S;

	if (bytes < sizeof(head))
		return false;
	memcpy(&head, body, sizeof(head));
	body += sizeof(head);
	text = channel_text(&body, end);
	why = text ? channel_text(&body, end) : NULL;
	login = why ? login_of(front, head.mirror, &unused) : NULL;
	if (!login || !*login->token_key)
		return false;
	for (const char *c = text; *c; c++) {
		if (*c <= ' ' || *c == 127)
			return false;
	}
	token_tell(front->fetcher, login->token_key, *text ? text : NULL, *why ? why : NULL,
		   head.refused, head.until_ns < most_ns ? head.until_ns : most_ns);
	*login->token_key = 0;
	return true;
}

/* The process says what it is, and what happens in it. */

static bool take_hello(struct front *front, const uint8_t *body, size_t bytes)
{
	struct channel_hello hello;
	char text[100] = "";

	/* Once: each may be a line of the log. */
	if (bytes != sizeof(hello) || front->greeted)
		return false;
	front->greeted = true;
	memcpy(&hello, body, sizeof(hello));
	if (hello.version != CHANNEL_VERSION)
		return false;
	for (unsigned i = 0; i < CHANNEL_SLOTS; i++) {
		if (front->slots[i].run)
			run_goes_out(front->slots[i].run);
	}
	relaxed_store(&front->counts->lacks, hello.lacks);
	for (unsigned i = 0; i < CHANNEL_LACKS; i++) {
		size_t used = strlen(text);

		if (hello.lacks & 1u << i)
			snprintf(text + used, sizeof(text) - used, "%s%s", used ? ", " : "",
				 channel_lack_names[i]);
	}
	if (*text && hello.lacks != front->lacked)
		event_log(&(struct event){ .name = "fetch_process_unconfined" },
			  "this machine does not confine it in all ways; it lacks: %s", text);
	front->lacked = hello.lacks;
	return true;
}

static bool take_event(struct front *front, const uint8_t *body, size_t bytes)
{
	const uint8_t *end = body + bytes;
	const char *name = channel_text(&body, end);
	const char *text = name ? channel_text(&body, end) : NULL;

	/* The only one that happens there, once for each login that was asked for. */
	if (!text || strcmp(name, "login_kept") != 0 || !front->logins_sent)
		return false;
	front->logins_sent--;
	event_log(&(struct event){ .name = "login_kept" }, "%s", text);
	return true;
}

static bool take_slot_message(struct slot *slot, const struct channel_head *head,
			      const uint8_t *body)
{
	uint32_t arrived;

	if (!slot->sent)
		return false;
	if (head->op == CHANNEL_IDENTITY)
		return take_identity(slot, body, head->bytes);
	if (head->op == CHANNEL_WHOLE)
		return !head->bytes && take_whole(slot);
	if (head->op == CHANNEL_OVER)
		return take_over(slot, body, head->bytes);
	if (head->bytes != sizeof(arrived))
		return false;
	memcpy(&arrived, body, sizeof(arrived));
	if (!has_arrived(slot, arrived))
		return false;
	if (slot->run) {
		drain(slot);
		say_taken(slot);
	}
	return true;
}

bool front_take(struct front *front, const struct channel_head *head, const uint8_t *body)
{
	if (!front->greeted && head->op != CHANNEL_HELLO)
		return false;
	switch (head->op) {
	case CHANNEL_IDENTITY:
	case CHANNEL_ARRIVED:
	case CHANNEL_WHOLE:
	case CHANNEL_OVER:
		return head->slot < CHANNEL_SLOTS &&
		       take_slot_message(&front->slots[head->slot], head, body);
	case CHANNEL_HELLO:
		return take_hello(front, body, head->bytes);
	case CHANNEL_ASK_LOGIN:
		return ask_login(front, body, head->bytes);
	case CHANNEL_TOKEN:
		return take_token(front, body, head->bytes);
	case CHANNEL_ANSWER:
		return head->slot < front->question_count &&
		       question_take_answer(&front->questions[head->slot], body, head->bytes);
	case CHANNEL_EVENT:
		return take_event(front, body, head->bytes);
	case CHANNEL_PONG:
		front->unanswered = 0;
		return true;
	default:
		return false;
	}
}

/* In the place of object.c. */

static void close_front(struct attachment *attachment)
{
	struct front *front = container_of(attachment, struct front, attachment);

	life_close(front);
	timer_queue_deinit(&front->timers);
	free(front->known);
	free(front->questions);
	free(front);
}

static int open_front(struct attachment *attachment, struct fetcher *fetcher)
{
	struct front *front = container_of(attachment, struct front, attachment);
	int err = timer_queue_init(&front->timers, fetcher->loop);

	if (err)
		return err;
	for (unsigned i = 0; i < CHANNEL_SLOTS; i++)
		front->slots[i] =
			(struct slot){ .front = front, .deadline = { .expire = on_deadline } };
	front->fetcher = fetcher;
	front->counts = &fetcher->processes;
	life_init(front);
	return 0;
}

static const struct attachment_kind front_kind = { sizeof(struct front), open_front, close_front };

struct front *front_of(struct fetcher *fetcher)
{
	return attachment_of(fetcher, &front_kind);
}

static struct slot *free_slot_of(struct front *front)
{
	for (unsigned i = 0; i < CHANNEL_SLOTS; i++) {
		if (!front->slots[i].run && !front->slots[i].sent)
			return &front->slots[i];
	}
	return NULL;
}

static void front_start(struct run *run)
{
	struct front *front = front_of(run->fetcher);
	struct slot *slot = front ? free_slot_of(front) : NULL;

	if (!slot) {
		run->local_failure = true;
		run_failed(
			run, FETCH_TRANSIENT,
			error_set(&run->error, -ENOBUFS, "the fetch process has too much to do"));
		return;
	}
	front->busy++;
	slot->run = run;
	slot->length = run->length;
	slot->widens = run->widens;
	slot->object_bytes = run->mirror->source->object_bytes;
	slot->arrived = slot->taken = slot->told = 0;
	run->private = slot;
	timer_set(&front->timers, &slot->deadline, run->deadline_ns + FRONT_GRACE_MS * NS_PER_MS);
	run->held = front->state != STATE_UP || !front->greeted;
	if (front->state == STATE_UP) {
		send_run(slot);
		life_flush(front);
	} else {
		life_need(front);
	}
}

/* Whether start() only sends a message. */
static bool front_ready(const struct run *run)
{
	const struct front *front = attachment_if_open(run->fetcher, &front_kind);

	return front && front->state == STATE_UP && front->greeted;
}

static void front_cancel(struct run *run)
{
	struct slot *slot = run->private;

	if (!slot)
		return;
	take_back(slot);
	slot_leave(slot);
	run->cut = true;
	run_failed(run, FETCH_TRANSIENT,
		   error_set(&run->error, -ECANCELED,
			     "given up, because nothing has arrived for a while"));
}

static void front_resume(struct run *run)
{
	struct slot *slot = run->private;

	if (!slot)
		return;
	drain(slot);
	if (slot->run) {
		say_taken(slot);
		life_flush(slot->front);
	}
}

static const struct object_front front_ops = {
	.start = front_start,
	.ready = front_ready,
	.cancel = front_cancel,
	.resume = front_resume,
	.inquire = front_inquire,
};

int front_use(const char *program, unsigned idle_ms)
{
	int err = object_front ? 0 : life_use(program, idle_ms);

	if (err || object_front)
		return err;
	remote_hooks.keeps_keys = true;
	object_front = &front_ops;
	return 0;
}
