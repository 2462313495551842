/* SPDX-License-Identifier: MIT */
/*
 * An error that is passed to the caller, for a reply or a log: msg_error() would write it to
 * stderr.
 */
#pragma once

#include <stddef.h>

struct error {
	char text[400]; /* what is wrong, with what value */
	char hint[200]; /* what to do; may be empty */
	const char *of; /* what of the request is wrong: "source", "mapping" or NULL */
	size_t number;	/* the index of that source or mapping */
};

/* Each keeps the first text that was set, as valid UTF-8. */
void error_set_text(struct error *error, const char *format, ...)
	__attribute__((format(printf, 2, 3)));
void error_set_hint(struct error *error, const char *format, ...)
	__attribute__((format(printf, 2, 3)));

/*
 * Use as `return error_set(error, -EINVAL, "...", ...);`. It is a macro so that analyzers see the
 * value.
 */
#define error_set(error, err, ...) (error_set_text(error, __VA_ARGS__), (err))
