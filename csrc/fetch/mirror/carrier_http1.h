/* SPDX-License-Identifier: MIT */
/*
 * Ranges over plain HTTP/1.1, on connections that are kept: what is asked for small units all the
 * time, with one send() and mostly one recv() each; the rest of a long body is received where it
 * belongs. libcurl makes the connections.
 *
 * A response that http1_head.h does not accept, a redirect, or more bytes than were announced, end
 * a request with CURLE_WEIRD_SERVER_REPLY: libcurl shall make the same request, and for a minute
 * all to that host. When a server has closed a kept connection meanwhile, the request is made again
 * on a new one.
 */
#pragma once

#include "fetch/mirror/carrier.h"

extern const struct carrier carrier_http1;

/*
 * Whether such a request would only be sent, on a connection that is kept: then a reader's thread may
 * start it (fetcher_ops.h).
 */
bool carrier_http1_can_send(const struct carriage *carriage, const struct fetcher *fetcher);
