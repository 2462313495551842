/* SPDX-License-Identifier: MIT */
/* Digests as text: two lower-case hexadecimal digits a byte. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* `text` has room for two digits a byte and a NUL. */
static inline char *hex_encode(const uint8_t *data, size_t bytes, char *text)
{
	static const char digits[] = "0123456789abcdef";

	for (size_t i = 0; i < bytes; i++) {
		text[2 * i] = digits[data[i] >> 4];
		text[2 * i + 1] = digits[data[i] & 15];
	}
	text[2 * bytes] = '\0';
	return text;
}

/* Returns false when `text` does not begin with so many digits. */
static inline bool hex_decode(const char *text, uint8_t *data, size_t bytes)
{
	static const char digits[] = "0123456789abcdef";

	for (size_t i = 0; i < 2 * bytes; i++) {
		const char *digit = text[i] ? strchr(digits, text[i]) : NULL;

		if (!digit)
			return false;
		data[i / 2] = (uint8_t)(data[i / 2] << 4 | (digit - digits));
	}
	return true;
}
