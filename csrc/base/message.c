/* SPDX-License-Identifier: MIT */
#include "base/message.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/error.h"

static const char *program_name = "btrfs-ublk";
static bool has_error;

void message_init(const char *program)
{
	program_name = program;
}

int print_help(const char *text)
{
	fputs(text, stdout);
	return fflush(stdout) ? EXIT_FAILED : EXIT_OK;
}

int print_version(void)
{
	printf("%s %s\n", program_name, BTRFS_UBLK_VERSION);
	return fflush(stdout) ? EXIT_FAILED : EXIT_OK;
}

bool answer_options(int argc, char **argv, const char *help, int *status)
{
	bool wants_help = argc == 2 && !strcmp(argv[1], "--help");

	if (!wants_help && (argc != 2 || strcmp(argv[1], "--version") != 0))
		return false;
	*status = wants_help ? print_help(help) : print_version();
	return true;
}

int hint_usage(void)
{
	msg_hint("`%s --help` shows the usage", program_name);
	return EXIT_USAGE;
}

int usage_error(const char *problem, const char *value)
{
	if (value)
		msg_error("%s: \"%s\"", problem, value);
	else
		msg_error("%s", problem);
	return hint_usage();
}

bool message_has_error(void)
{
	return __atomic_load_n(&has_error, __ATOMIC_RELAXED);
}

/* Writes each message with one call, so that lines of several threads do not mix. */
static void emit(const char *prefix, const char *format, va_list args)
{
	char text[2048];

	vsnprintf(text, sizeof(text), format, args);
	fprintf(stderr, "%s%s%s\n", prefix[0] == ' ' ? "" : program_name, prefix, text);
}

#define DEFINE_MESSAGE(name, prefix)        \
	void name(const char *format, ...)  \
	{                                   \
		va_list args;               \
                                            \
		va_start(args, format);     \
		emit(prefix, format, args); \
		va_end(args);               \
	}

DEFINE_MESSAGE(msg_hint, "  hint: ")
DEFINE_MESSAGE(msg_warning, ": warning: ")

void msg_error(const char *format, ...)
{
	va_list args;

	__atomic_store_n(&has_error, true, __ATOMIC_RELAXED);
	va_start(args, format);
	emit(": error: ", format, args);
	va_end(args);
}

void msg_error_of(const struct error *error)
{
	msg_error("%s", error->text);
	if (*error->hint)
		msg_hint("%s", error->hint);
}
