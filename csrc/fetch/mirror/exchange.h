/* SPDX-License-Identifier: MIT */
/*
 * One request and its response: a range into a buffer, or a short text. It follows redirects (never
 * from https to http, and without credentials to other hosts), has the login renewed once, and
 * accepts only what was asked for.
 */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "content/source.h"
#include "fetch/mirror/carrier.h"
#include "fetch/mirror/remote.h"
#include "fetch/mirror/response.h"
#include "fetch/run.h"

struct exchange {
	/* Set by the caller, zeroed otherwise. What these point to must stay until done(). */
	struct remote *remote;
	struct fetcher *fetcher;
	char *url; /* malloc()ed; the exchange frees it. A URL in the login takes precedence */
	struct wanted_range wanted; /* length 0: no range; the text is wanted */
	struct run *run; /* takes the range; NULL: it belongs to `data`, of wanted.length */
	uint8_t *data;
	/*
	 * Called when the response is a range that was asked for, before any of it is taken. It may
	 * refuse that by a verdict, and a reason. May be NULL.
	 */
	void (*accepted)(struct exchange *exchange);
	const char *via;      /* the cache to ask, for what is at home; NULL: none */
	const char *if_range; /* NULL: none is sent */
	const char *accept;   /* media types; NULL: any */
	char *form;	      /* POST, as application/x-www-form-urlencoded; freed like `url` */
	uint64_t deadline_ns; /* CLOCK_MONOTONIC */
	bool fresh;	      /* use no kept connection */
	unsigned *progress;   /* incremented when something has arrived; may be NULL */
	struct login *login;  /* a reference to use instead of the remote's login; may be NULL */
	/* The remote lives no longer than the exchange, which waits for what is read for it. */
	bool keeps_remote;
	void (*done)(struct exchange *exchange); /* called when it is over */

	/* The response. */
	int result; /* 0, or a negative errno, with the fields below */
	enum fetch_failure failure;
	uint32_t retry_after_ms;
	bool cut; /* no complete response came: its connection may be dead */
	struct error error;
	CURLcode code; /* CURLE_OK: the server has responded */
	long verify;   /* CURLINFO_SSL_VERIFYRESULT, if it has not */
	struct response response;
	char *text; /* the body, with a NUL; cleared and freed by exchange_clear() */
	size_t text_length;

	/* Internal. */
	struct carriage carriage;
	const struct carrier *carrier; /* NULL: none has the request */
	struct exchange *next_waiting;
	char *location;	    /* the target of a redirect */
	char *referer;	    /* the origin that it came from */
	char *asked, *host; /* URL and "Host" of a request to the cache; NULL: to no cache */
	struct response_verdict verdict;
	struct error reason;
	size_t text_room;
	uint64_t skipped;  /* bytes before the range */
	uint32_t received; /* bytes of the range */
	unsigned redirects;
	bool own_login, judged, waiting, renewed, too_long;
	bool direct; /* the cache has refused the login, and only the source is believed in that */
};

/* Starts it. Calls done() on the fetcher's thread, perhaps before this returns. */
void exchange_start(struct exchange *exchange);
/* Whether a request for a range of `url` would only be sent, so that a reader's thread may start it. */
bool exchange_can_send(struct remote *remote, const struct fetcher *fetcher, const char *url);
/* Gives up and calls done() with -ECANCELED. */
void exchange_cancel(struct exchange *exchange);
/* There may be space again. */
void exchange_resume(struct exchange *exchange);
/* Frees the response. */
void exchange_clear(struct exchange *exchange);

/* login.c calls one of these when the login is ready, or has failed. */
void exchange_login_ready(struct exchange *exchange, struct login *login);
void exchange_login_failed(struct exchange *exchange, int err, enum fetch_failure failure,
			   const struct error *error);
/* Waits for the remote's login, and then calls one of the above. */
void login_wait(struct exchange *exchange);
/* Has another one made, which nobody waits for. */
void login_renew(struct remote *remote, struct fetcher *fetcher);
void login_wait_no_more(struct exchange *exchange);
