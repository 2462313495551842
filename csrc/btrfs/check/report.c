/* SPDX-License-Identifier: MIT */
#include "btrfs/check/report.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void report_deinit(struct report *report)
{
	for (size_t i = 0; i < report->count; i++)
		free(report->violations[i].text);
	free(report->violations);
	*report = (struct report){ 0 };
}

/* A violation is counted even when there is no memory for its text. */
void report_add(struct report *report, const char *rule, const char *format, ...)
{
	struct violation *violations;
	char *text;
	va_list args;
	int length;

	report->total++;
	if (report->count == REPORT_VIOLATIONS_MAX)
		return;
	violations =
		reallocarray(report->violations, report->count + 1, sizeof(*report->violations));
	if (!violations)
		return;
	report->violations = violations;
	va_start(args, format);
	length = vasprintf(&text, format, args);
	va_end(args);
	if (length < 0)
		return;
	/* Several parts of the check may find the same damage. */
	for (size_t i = 0; i < report->count; i++) {
		if (!strcmp(violations[i].text, text)) {
			free(text);
			report->total--;
			return;
		}
	}
	violations[report->count++] = (struct violation){ rule, text };
}
