/* SPDX-License-Identifier: MIT */
/* Parses command lines of benchmark programs, which have options with values, and one word. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

/* An option. One of `text` and `number` is set. */
struct bench_option {
	const char *name; /* NULL: the end of the table */
	const char **text;
	uint64_t *number;
	uint64_t least, most;
	bool *given; /* whether it was given; may be NULL */
};

enum { BENCH_OPTIONS_DONE = -1 };

/*
 * Returns BENCH_OPTIONS_DONE, and sets `word` to the only word that is no option, or to NULL if
 * there is none, or more than one. Otherwise returns an exit status, after a message or the help.
 * Needs message_init().
 */
int bench_options_parse(int argc, char **argv, const char *help, const struct bench_option *table,
			const char **word);
