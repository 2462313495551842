/* SPDX-License-Identifier: MIT */
/* The command lines of benchmark programs: options with a value each, and one word. */
#ifndef BENCH_OPTIONS_H
#define BENCH_OPTIONS_H

#include <stdbool.h>
#include <stdint.h>

/* One of `text` and `number` is set. */
struct bench_option {
	const char *name; /* NULL: the end of the table */
	const char **text;
	uint64_t *number;
	uint64_t least, most;
	bool *given; /* NULL: nobody asks */
};

enum { BENCH_OPTIONS_DONE = -1 };

/*
 * Returns BENCH_OPTIONS_DONE, with the only word that is no option in `word`; it is NULL where there
 * is none, or are several. Else an exit status: the help or the version was printed, or a message.
 */
int bench_options_parse(int argc, char **argv, const char *program, const char *help,
			const struct bench_option *table, const char **word);

#endif
