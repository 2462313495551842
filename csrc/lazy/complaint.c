/* SPDX-License-Identifier: MIT */
#include "lazy/complaint.h"

#include <stdarg.h>
#include <stdio.h>

void complaint_text(struct complaint *complaint, const char *format, ...)
{
	va_list args;

	if (*complaint->text)
		return;
	va_start(args, format);
	vsnprintf(complaint->text, sizeof(complaint->text), format, args);
	va_end(args);
}

void complaint_hint(struct complaint *complaint, const char *format, ...)
{
	va_list args;

	if (*complaint->hint)
		return;
	va_start(args, format);
	vsnprintf(complaint->hint, sizeof(complaint->hint), format, args);
	va_end(args);
}
