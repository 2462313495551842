/* SPDX-License-Identifier: MIT */
#include "fetch/event.h"

#include <stdarg.h>
#include <stdio.h>
#include <time.h>

#include "base/clock.h"
#include "base/message.h"
#include "base/utf8.h"
#include "content/source.h"

enum {
	LINES_PER_S = 5,
	FIELD_BYTES = 600,
};

struct line {
	char text[1800];
	size_t used;
};

static void add(struct line *line, const char *format, ...) __attribute__((format(printf, 2, 3)));

static void add(struct line *line, const char *format, ...)
{
	size_t room = sizeof(line->text) - line->used;
	va_list args;
	int length;

	va_start(args, format);
	length = vsnprintf(line->text + line->used, room, format, args);
	va_end(args);
	if (length > 0)
		line->used += (size_t)length < room ? (size_t)length : room - 1;
}

/*
 * Adds a quoted text. Characters that would end the quotes or the line are replaced, because texts
 * also come from servers.
 */
static void add_text(struct line *line, const char *key, const char *text)
{
	char plain[FIELD_BYTES];
	size_t length = 0;

	for (; text[length] && length < sizeof(plain) - 1; length++) {
		char c = text[length];

		if (c == '"' || c == '\\')
			c = '\'';
		else if ((unsigned char)c < ' ' || c == 127)
			c = '?';
		plain[length] = c;
	}
	plain[length] = 0;
	utf8_repair(plain);
	add(line, " %s=\"%s\"", key, plain);
}

static void begin(struct line *line, const char *name)
{
	struct timespec now;
	struct tm parts;

	clock_gettime(CLOCK_REALTIME, &now);
	gmtime_r(&now.tv_sec, &parts);
	line->used = 0;
	add(line, "time=%04d-%02d-%02dT%02d:%02d:%02d.%03dZ event=%s", parts.tm_year + 1900,
	    parts.tm_mon + 1, parts.tm_mday, parts.tm_hour, parts.tm_min, parts.tm_sec,
	    (int)(now.tv_nsec / 1000000), name);
}

static void end(struct line *line, const char *format, va_list args)
{
	char message[FIELD_BYTES];

	vsnprintf(message, sizeof(message), format, args);
	add_text(line, "message", message);
	msg_warning("%s", line->text);
}

static bool has_room(void)
{
	/* Each thread that fetches has its own limit. */
	static _Thread_local uint64_t log_second;
	static _Thread_local unsigned logged;
	uint64_t second = clock_now_ns() / NS_PER_S;
	struct line line;

	if (second != log_second) {
		if (logged > LINES_PER_S) {
			begin(&line, "left_out");
			msg_warning("%s count=%u", line.text, logged - LINES_PER_S);
		}
		log_second = second;
		logged = 0;
	}
	return ++logged <= LINES_PER_S;
}

static void (*elsewhere)(const struct event *event, const char *text);

void event_send_to(void (*log)(const struct event *event, const char *text))
{
	elsewhere = log;
}

void event_log(const struct event *event, const char *format, ...)
{
	char text[FIELD_BYTES];
	struct line line;
	va_list args;

	if (elsewhere) {
		va_start(args, format);
		vsnprintf(text, sizeof(text), format, args);
		va_end(args);
		elsewhere(event, text);
		return;
	}
	if (!has_room())
		return;
	begin(&line, event->name);
	if (event->source)
		add(&line, " source=%llu", (unsigned long long)event->source->id);
	if (event->unit)
		add(&line, " unit=%llu", (unsigned long long)*event->unit);
	if (event->mirror)
		add(&line, " mirror=%u kind=%s", event->mirror->index, event->mirror->ops->name);
	if (event->host)
		add_text(&line, "host", event->host);
	if (event->reason)
		add(&line, " reason=%s", event->reason);
	va_start(args, format);
	end(&line, format, args);
	va_end(args);
}

void event_log_host(const char *name, const char *host, const char *format, ...)
{
	struct line line;
	va_list args;

	begin(&line, name);
	add_text(&line, "host", host);
	va_start(args, format);
	end(&line, format, args);
	va_end(args);
}
