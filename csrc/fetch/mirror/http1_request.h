/* SPDX-License-Identifier: MIT */
/* Requests of carrier_http1.h as text. */
#pragma once

#include "fetch/mirror/carrier.h"

enum { HTTP1_REQUEST_MAX_BYTES = 8 << 10 };

/* Where a plain URL leads: parts of it, which do not end in NUL. */
struct http1_target {
	const char *host; /* with its port, unless that is 80 */
	size_t host_length;
	const char *path; /* up to the end of the URL */
};

/*
 * Whether carrier_http1 can make a request; stores its target. What libcurl would have to look up
 * or to change (a proxy, a user, a name beyond ASCII, a header of the login that would replace one
 * that each request has) is not for it, nor what is too long.
 */
bool http1_request_is_plain(const struct carriage *carriage, struct http1_target *target);

/* Writes a plain request to `text`, without NUL. Returns its length, or 0 when it is too long. */
size_t http1_request_write(const struct carriage *carriage, const struct http1_target *target,
			   char text[static HTTP1_REQUEST_MAX_BYTES]);
