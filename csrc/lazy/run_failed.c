/* SPDX-License-Identifier: MIT */
/* A file of its own, for programs that have kinds of mirrors, and a fetcher other than the server's. */
#include <stdarg.h>
#include <stdio.h>

#include "base/utf8.h"
#include "lazy/run.h"

void run_failed(struct run *run, int err, enum fetch_failure failure, const char *format, ...)
{
	va_list args;

	va_start(args, format);
	vsnprintf(run->error.text, sizeof(run->error.text), format, args);
	va_end(args);
	utf8_repair(run->error.text);
	run->result = err;
	run->failure = failure;
	run->sink->over(run);
}
