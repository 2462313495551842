/* SPDX-License-Identifier: MIT */
/*
 * Messages of helpers to people. stdout is for data: every message goes to stderr, as "PROGRAM:
 * error: what was wrong, with what value", followed by "  hint: what to do".
 */
#pragma once

#include <stdbool.h>

struct error;

/* Exit statuses of every helper. */
enum {
	EXIT_OK = 0,
	EXIT_FAILED = 1,     /* the environment or the kernel refused */
	EXIT_USAGE = 2,	     /* the caller's input is wrong, and nothing was touched */
	EXIT_CAPABILITY = 3, /* this machine lacks what is needed */
};

void message_init(const char *program);

/* The answers to --help and --version, on stdout. Each returns an exit status. */
int print_help(const char *text);
int print_version(void);
/*
 * Gives them to a program that has no other options. Returns whether it was asked for one, and if
 * so, sets its exit status.
 */
bool answer_options(int argc, char **argv, const char *help, int *status);
/* Says what is wrong with the usage, and with what value unless NULL. Returns EXIT_USAGE. */
int usage_error(const char *problem, const char *value);
/* Says where the usage is explained, after a message of what is wrong. Returns EXIT_USAGE. */
int hint_usage(void);

/* Whether there was an error message. */
bool message_has_error(void);

void msg_error(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* For `return msg_fail(EXIT_FAILED, "...", ...);`: gives the message. `status` is evaluated after. */
#define msg_fail(status, ...) (msg_error(__VA_ARGS__), (status))
/* Gives the text of an error, and its hint if there is one. */
void msg_error_of(const struct error *error);
void msg_hint(const char *format, ...) __attribute__((format(printf, 1, 2)));
void msg_warning(const char *format, ...) __attribute__((format(printf, 1, 2)));
