/* SPDX-License-Identifier: MIT */
#include "base/size.h"

#include <ctype.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>

static const char unit_letters[] = "KMGTPE";

int size_parse(const char *text, uint64_t *bytes)
{
	uint64_t value = 0;
	unsigned shift = 0;

	if (!isdigit((unsigned char)*text))
		return -EINVAL;
	for (; isdigit((unsigned char)*text); text++) {
		if (__builtin_mul_overflow(value, 10u, &value) ||
		    __builtin_add_overflow(value, (uint64_t)(*text - '0'), &value))
			return -ERANGE;
	}
	if (*text) {
		const char *unit = strchr(unit_letters, toupper((unsigned char)*text));

		if (unit) {
			shift = 10 * (unsigned)(unit - unit_letters + 1);
			text++;
			if (strcasecmp(text, "iB") && strcasecmp(text, "B") && *text)
				return -EINVAL;
		} else if (strcasecmp(text, "B")) {
			return -EINVAL;
		}
	}
	if (shift && value > UINT64_MAX >> shift)
		return -ERANGE;
	*bytes = value << shift;
	return 0;
}

const char *size_format(uint64_t bytes, char text[static SIZE_TEXT_BYTES])
{
	int unit = -1;
	double value = (double)bytes;

	while (value >= 1024 && unit < (int)sizeof(unit_letters) - 2) {
		value /= 1024;
		unit++;
	}
	if (unit < 0)
		snprintf(text, SIZE_TEXT_BYTES, "%llu B", (unsigned long long)bytes);
	else
		snprintf(text, SIZE_TEXT_BYTES, "%.4g %ciB", value, unit_letters[unit]);
	return text;
}
