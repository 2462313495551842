/* SPDX-License-Identifier: MIT */
/* Why something was refused: for a reply or a log, where msg_error() would come to the wrong one. */
#ifndef LAZY_COMPLAINT_H
#define LAZY_COMPLAINT_H

struct complaint {
	char text[400]; /* what is wrong, with what value */
	char hint[200]; /* what to do; may be empty */
};

/* Each keeps what came first. */
void complaint_text(struct complaint *complaint, const char *format, ...)
	__attribute__((format(printf, 2, 3)));
void complaint_hint(struct complaint *complaint, const char *format, ...)
	__attribute__((format(printf, 2, 3)));

/* `return complain(complaint, -EINVAL, "...", ...);` A macro, so that analyzers see what it returns. */
#define complain(complaint, err, ...) (complaint_text(complaint, __VA_ARGS__), (err))

#endif
