/* SPDX-License-Identifier: MIT */
/*
 * What a mirror knows its object by: one line of text. Of an object behind HTTP, it has what the
 * server says, "etag ETAG", "modified DATE" or "etag ETAG modified DATE", each as it was sent. Of
 * other kinds, only the same text is the same identity.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>

enum { IDENTITY_BYTES = 320 /* with its NUL */ };

/* Whether a text is such a line, of an object behind HTTP. */
bool identity_is_valid(const char *text);

/*
 * Whether both are of one unchanged object. ETags are compared if both have one, else dates. Weak
 * ETags promise less, and one that is weak in one of both only is another kind of promise, so
 * there the dates have to say the same.
 */
bool identity_is_same(const char *one, const char *other);

enum condition { CONDITION_NONE, CONDITION_ETAG, CONDITION_DATE };

/*
 * Writes what can be sent as If-Range: a valid strong ETag, or the date of what has no ETag (RFC
 * 9110, 13.1.5).
 */
enum condition identity_condition(const char *identity, char text[static IDENTITY_BYTES]);
