/* SPDX-License-Identifier: MIT */
/*
 * What the log gets of fetching: one line per event, of KEY=VALUE words that programs can tell apart
 * (docs/operation.md). No credentials, no query of a URL: what a kind of mirror complains of has none.
 */
#ifndef LAZY_EVENT_H
#define LAZY_EVENT_H

struct fetcher;
struct mirror;
struct source;
struct unit;

/* What is known of it; all but the name may be missing. */
struct event {
	const char *name; /* a word */
	const struct source *source;
	const struct unit *unit; /* of that source, whatever `source` is */
	const struct mirror *mirror;
	const char *reason; /* a word */
};

/* On the fetcher's thread. At most some lines in a second; then their number. */
void event_log(struct fetcher *fetcher, const struct event *event, const char *format, ...)
	__attribute__((format(printf, 3, 4)));
/* Of a host. They are few by themselves. */
void event_log_host(const char *name, const char *host, const char *format, ...)
	__attribute__((format(printf, 3, 4)));

#endif
