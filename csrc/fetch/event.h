/* SPDX-License-Identifier: MIT */
/*
 * The log of fetching: one line per event, of KEY=VALUE words for programs to parse
 * (docs/operation.md). It contains no credentials and no query of a URL, since texts from mirrors
 * contain none.
 */
#pragma once

#include <stdint.h>

struct mirror;
struct source;

/* What is known about the event. Everything but the name may be missing. */
struct event {
	const char *name; /* one word */
	const struct source *source;
	const uint64_t *unit; /* its number */
	const struct mirror *mirror;
	const char *host;   /* of the mirror */
	const char *reason; /* one word */
};

/*
 * Logs an event, on the fetcher's thread. Only some lines are written per second; after that, only
 * their number.
 */
void event_log(const struct event *event, const char *format, ...)
	__attribute__((format(printf, 2, 3)));
/* Logs an event of a host. These are rare, so their number is not limited. */
void event_log_host(const char *name, const char *host, const char *format, ...)
	__attribute__((format(printf, 3, 4)));
/*
 * Has what event_log() is told go there, in a program without a log of its own. To be called before
 * there are other threads.
 */
void event_send_to(void (*log)(const struct event *event, const char *text));
