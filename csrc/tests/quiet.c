/* SPDX-License-Identifier: MIT */
#include "tests/quiet.h"

#include <stdarg.h>
#include <stdio.h>

#include "base/error.h"

unsigned quiet_messages;

void __wrap_msg_error(const char *format, ...);
void __wrap_msg_error_of(const struct error *error);
void __wrap_msg_hint(const char *format, ...);
void __wrap_msg_warning(const char *format, ...);

#define MESSAGE(name)                                        \
	void __wrap_##name(const char *format, ...)          \
	{                                                    \
		char text[512];                              \
		va_list args;                                \
                                                             \
		va_start(args, format);                      \
		vsnprintf(text, sizeof(text), format, args); \
		va_end(args);                                \
		quiet_messages++;                            \
	}

MESSAGE(msg_error)
MESSAGE(msg_hint)
MESSAGE(msg_warning)

void __wrap_msg_error_of(const struct error *error)
{
	quiet_messages += *error->text != 0;
}
