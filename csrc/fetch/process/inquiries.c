/* SPDX-License-Identifier: MIT */
/*
 * Has the process asked what objects are, and what tags name. Its mirrors live no longer than
 * their inquiries, so the process gets each with its inquiry, and forgets it.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/utf8.h"
#include "fetch/mirror/object.h"
#include "fetch/mirror/remote.h"
#include "fetch/process/internal.h"

/* How many processes are asked: one may have died of the answer to another inquiry. */
enum { TRIES = 2 };

static void free_unused(struct question *question)
{
	if (question->inquiry || question->sent)
		return;
	question->front->busy--;
	question->front->busy_ns = clock_now_ns();
}

void question_settle(struct question *question)
{
	struct inquiry *inquiry = question->inquiry;

	if (!inquiry || !question->over || question->login.reading)
		return;
	question->inquiry = NULL;
	question->over = false;
	free_unused(question);
	inquiry->done(inquiry);
}

static void finish(struct question *question)
{
	timer_clear(&question->deadline);
	question->over = true;
	question_settle(question);
}

static void fail(struct question *question, int err, const char *text)
{
	struct inquiry *inquiry = question->inquiry;

	inquiry->result = error_set(&inquiry->error, err, "%s", text);
	finish(question);
}

static unsigned number_of(const struct question *question)
{
	return (unsigned)(question - question->front->questions);
}

static bool waits(const struct question *question)
{
	return question->inquiry && !question->over;
}

static void send_question(struct question *question)
{
	const struct inquiry *inquiry = question->inquiry;
	const struct remote *remote = inquiry->mirror->private;
	const struct channel_inquire body = { .deadline_ns = inquiry->deadline_ns };
	const char *const texts[] = { inquiry->mirror->ops->name, remote->keys, inquiry->name ?: "",
				      NULL };

	question->tries++;
	question->sent = !channel_add(&question->front->channel, CHANNEL_INQUIRE,
				      number_of(question), &body, sizeof(body), texts);
	if (!question->sent)
		fail(question, -ENOMEM, "no memory for a request");
}

void questions_send(struct front *front)
{
	for (unsigned i = 0; i < front->question_count; i++) {
		if (waits(&front->questions[i]) && !front->questions[i].sent)
			send_question(&front->questions[i]);
	}
}

void questions_fail(struct front *front, const char *why)
{
	for (unsigned i = 0; i < front->question_count; i++) {
		if (waits(&front->questions[i]))
			fail(&front->questions[i], -EIO, why);
	}
}

void questions_lost(struct front *front, const char *why)
{
	char text[sizeof(((struct error *)0)->text)];

	snprintf(text, sizeof(text), "the fetch process has failed: %s", why);
	for (unsigned i = 0; i < front->question_count; i++) {
		struct question *question = &front->questions[i];

		if (!question->sent)
			continue;
		question->sent = question->login.wanted = false;
		if (!question->inquiry)
			free_unused(question);
		else if (!question->over && question->tries == TRIES)
			fail(question, -EIO, text);
	}
}

static void on_deadline(struct timer *timer)
{
	struct question *question = container_of(timer, struct question, deadline);

	fail(question, -ETIMEDOUT,
	     question->sent ? "not done in time: the fetch process says nothing" :
			      "not done in time: the fetch process has not started yet");
}

/* It is shown to users, on terminals too. */
static void set_text(char *to, size_t room, const char *text)
{
	snprintf(to, room, "%s", text);
	text_make_plain(to);
}

static void take_error(struct inquiry *inquiry, int result, const char *text, const char *hint)
{
	char plain[sizeof(inquiry->error.text)];

	inquiry->result = result;
	set_text(plain, sizeof(plain), text);
	error_set_text(&inquiry->error, "%s", plain);
	set_text(plain, sizeof(plain), hint);
	error_set_hint(&inquiry->error, "%s", plain);
}

static bool take_found(struct inquiry *inquiry, uint64_t size, const char *identity,
		       const char *document)
{
	if (inquiry->name) {
		if (*identity || strlen(document) > INQUIRY_TEXT_MAX_BYTES)
			return false;
		inquiry->text = strdup(document);
		return inquiry->text;
	}
	if (*document ||
	    (*identity && (inquiry->mirror->ops->immutable || !front_is_plain(identity))))
		return false;
	inquiry->found.size = size;
	if (*identity)
		inquiry->found.identity = strdup(identity);
	return !*identity || inquiry->found.identity;
}

/* Returns false where a genuine fetch process would not say that. */
bool question_take_answer(struct question *question, const uint8_t *body, size_t bytes)
{
	const uint8_t *end = body + bytes;
	struct channel_answer answer;
	const char *text, *hint, *identity, *document;

	if (!question->sent || bytes < sizeof(answer))
		return false;
	memcpy(&answer, body, sizeof(answer));
	body += sizeof(answer);
	text = channel_text(&body, end);
	hint = text ? channel_text(&body, end) : NULL;
	identity = hint ? channel_text(&body, end) : NULL;
	document = identity ? channel_text(&body, end) : NULL;
	if (!document || answer.result > 0 || answer.result < -FRONT_ERRNO_MAX ||
	    question->login.wanted)
		return false;
	if (waits(question)) {
		if (answer.result)
			take_error(question->inquiry, answer.result, text, hint);
		else if (!take_found(question->inquiry, answer.size, identity, document))
			return false;
	}
	question->sent = false;
	if (!question->inquiry)
		free_unused(question);
	else if (!question->over)
		finish(question);
	return true;
}

static void make_questions(struct front *front)
{
	front->questions = calloc(CHANNEL_INQUIRIES, sizeof(*front->questions));
	if (!front->questions)
		return;
	front->question_count = CHANNEL_INQUIRIES;
	for (unsigned i = 0; i < front->question_count; i++)
		front->questions[i] =
			(struct question){ .front = front, .deadline = { .expire = on_deadline } };
}

static struct question *free_question_of(struct front *front)
{
	if (!front->questions)
		make_questions(front);
	for (unsigned i = 0; i < front->question_count; i++) {
		if (!front->questions[i].inquiry && !front->questions[i].sent)
			return &front->questions[i];
	}
	return NULL;
}

void front_inquire(struct inquiry *inquiry)
{
	struct front *front = front_of(inquiry->fetcher);
	struct question *question = front ? free_question_of(front) : NULL;

	if (!question) {
		inquiry_failed(inquiry, -ENOBUFS, "the fetch process has too much to do");
		return;
	}
	front->busy++;
	question->inquiry = inquiry;
	question->tries = 0;
	timer_set(&front->timers, &question->deadline,
		  inquiry->deadline_ns + FRONT_GRACE_MS * NS_PER_MS);
	if (front->state == STATE_UP) {
		send_question(question);
		life_flush(front);
	} else {
		life_need(front);
	}
}
