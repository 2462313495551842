/* SPDX-License-Identifier: MIT */
/*
 * Carriers bring one request to a server, and its response back, as it is: no redirects, no second
 * try that a server could see as a failure, no judgement. carrier_curl does all of that by
 * libcurl, carrier_http1.h what is plain and frequent. mirror/exchange.h decides which, and what a
 * response is worth.
 */
#pragma once

#include <curl/curl.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

#include "fetch/mirror/remote.h"
#include "fetch/timer_queue.h"
#include "fetch/transfer.h"

enum {
	/* How much of an unwanted body is read, which is cheaper than a new connection. */
	CARRIER_THROW_AWAY_BYTES = 64 << 10,
	/* What carrier->start() returns where another carrier has to be asked. */
	CARRIER_NOT_MINE = 1,
	/* What ops->space() returns for a body that is not wanted. */
	CARRIER_UNWANTED = -1,
	/* What it returns where there is no place now; carrier->resume() follows, or stop(). */
	CARRIER_PAUSED = -2,
};

struct carriage;
struct curl_handle;
struct curl_handles;
struct http1_connection;
struct http1_host;

/* What a carrier calls, on the fetcher's thread. */
struct carriage_ops {
	/* A line of the head, with its end. */
	void (*line)(struct carriage *carriage, const char *line, size_t length);
	/*
	 * Stores in `parts`, which has `room` entries, where the next bytes of the body belong, and
	 * returns how many it has stored. 0: no more belong anywhere, so that the request has
	 * failed. Or CARRIER_UNWANTED (this body is thrown away), or CARRIER_PAUSED.
	 */
	int (*space)(struct carriage *carriage, struct iovec *parts, int room);
	/* These bytes are there, at the beginning of what space() has said last. */
	void (*take)(struct carriage *carriage, size_t bytes);
	/*
	 * It is over, and `carriage` may be reused or freed; never called from within start().
	 * CURLE_OK: all of the response has come. CURLE_WRITE_ERROR: no more of it was wanted. Else
	 * carriage->text may say more.
	 */
	void (*over)(struct carriage *carriage, CURLcode code);
};

struct carrier {
	/* Returns 0, CARRIER_NOT_MINE, or a negative errno; then over() is not called. */
	int (*start)(struct carriage *carriage, struct fetcher *fetcher);
	/* Gives up: over() is not called any more. */
	void (*stop)(struct carriage *carriage);
	/* There may be a place again after CARRIER_PAUSED. */
	void (*resume)(struct carriage *carriage);
};

/*
 * By libcurl, which can do all requests. Its handles are kept for a while, set up for the requests of
 * a login to a URL, so that the next such request sets only its range and its deadline.
 */
extern const struct carrier carrier_curl;

struct carriage {
	/* Set by the caller, zeroed otherwise. What these point to must stay until over(). */
	const struct carriage_ops *ops;
	const struct remote *remote;
	const struct login *login;
	const char *url;
	const char *origin; /* "Host", where a cache is asked for it; NULL: that of the URL */
	const char *if_range, *accept; /* NULL: none is sent */
	const char *referer;	       /* the origin that has redirected here, or NULL */
	const char *form;	       /* POST; NULL: GET */
	uint64_t offset;	       /* of the range, bytes */
	uint32_t length;	       /* 0: no range */
	uint64_t deadline_ns;
	bool home;  /* credentials may be sent there */
	bool fresh; /* use no kept connection */

	/* Set by the carrier before over(). */
	char *redirect; /* where a redirect leads, malloc()ed; the caller frees it */
	long verify;	/* CURLINFO_SSL_VERIFYRESULT, of a request that failed */
	char text[CURL_ERROR_SIZE];

	/* The carrier's own. */
	size_t thrown_away; /* bytes of an unwanted body */
	struct transfer transfer;
	struct curl_handles *handles;
	struct curl_handle *handle;
	size_t taken; /* of what libcurl brings again after a pause */
	struct timer timer;
	struct link waiting; /* for a connection */
	struct http1_host *host;
	struct http1_connection *connection;
};
