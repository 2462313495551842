/* SPDX-License-Identifier: MIT */
#include "image/source.h"

#include <stdio.h>
#include <string.h>

#include "base/utf8.h"

bool source_keeps_attribute(const char *name)
{
	static const char *const kept[] = { "user.", "trusted.", "security." };

	for (size_t i = 0; i < sizeof(kept) / sizeof(kept[0]); i++)
		if (!strncmp(name, kept[i], strlen(kept[i])))
			return name[strlen(kept[i])] != '\0';
	return !strcmp(name, "system.posix_acl_access") ||
	       !strcmp(name, "system.posix_acl_default");
}

int source_error_at(struct error *error, int err, const char *what)
{
	char text[sizeof(error->text)];
	size_t bytes = strlen(what);
	/* Of a long name, the end says more. */
	size_t cut = bytes > 200 ? bytes - 200 : 0;

	memcpy(text, error->text, sizeof(text));
	/* NOLINTNEXTLINE(bugprone-unused-return-value): what does not fit is cut. */
	(void)snprintf(error->text, sizeof(error->text), "\"%s%s\": %.190s", cut ? "…" : "",
		       what + cut, text);
	utf8_repair(error->text);
	return err;
}
