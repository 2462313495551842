/* SPDX-License-Identifier: MIT */
/*
 * The head of a response of HTTP/1.1 whose body has a known length (RFC 9112), and nothing else:
 * whatever might be understood in two ways is refused, and left to libcurl.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { HTTP1_HEAD_MAX_BYTES = 8 << 10 /* with the empty line */ };

struct http1_head {
	unsigned status;	 /* 200 to 599 */
	uint64_t content_length; /* bytes of the body */
	size_t length;		 /* bytes of the head, with the empty line */
	bool close;		 /* the connection is not kept */
};

/*
 * Parses the head at the beginning of what has arrived. Returns 1 with `*head` filled in, 0 when it
 * goes on beyond `length`, or -EPROTO:
 *
 * - a line that does not end in CR LF, or has another control character than a tab
 * - another status line than "HTTP/1.1 NNN ...", or a status without a body of its own (1xx, 204)
 * - a header that is not "token: value", such as the continuation of the last one
 * - not exactly one Content-Length; a Transfer-Encoding; a Connection with unknown words
 * - a head of more than HTTP1_HEAD_MAX_BYTES
 */
int http1_head_parse(const char *data, size_t length, struct http1_head *head);
