/* SPDX-License-Identifier: MIT */
#include "base/error.h"

#include <stdarg.h>
#include <stdio.h>

#include "base/utf8.h"

void error_set_text(struct error *error, const char *format, ...)
{
	va_list args;

	if (*error->text)
		return;
	va_start(args, format);
	vsnprintf(error->text, sizeof(error->text), format, args);
	va_end(args);
	utf8_repair(error->text);
}

void error_set_hint(struct error *error, const char *format, ...)
{
	va_list args;

	if (*error->hint)
		return;
	va_start(args, format);
	vsnprintf(error->hint, sizeof(error->hint), format, args);
	va_end(args);
	utf8_repair(error->hint);
}
