/* SPDX-License-Identifier: MIT */
/*
 * One request and its answer: a range into a buffer, or a short text. Follows redirects (never from https
 * to http, and without credentials to other hosts), has the login renewed once, and takes nothing but
 * what was asked for.
 */
#ifndef LAZY_MIRROR_EXCHANGE_H
#define LAZY_MIRROR_EXCHANGE_H

#include <stddef.h>
#include <stdint.h>

#include "lazy/mirror/answer.h"
#include "lazy/mirror/remote.h"
#include "lazy/source.h"
#include "lazy/transfer.h"

struct exchange {
	/* Set by the caller, zeroed otherwise; all that is pointed to stays until done(). */
	struct remote *remote;
	struct fetcher *fetcher; /* NULL: blocking, on a hand */
	char *url;		 /* malloc()ed; the exchange frees it */
	struct answer_wish wish; /* length 0: no range, but the text */
	uint8_t *data;		 /* wish.length */
	const char *if_range;	 /* NULL: none */
	char *form;		 /* POST, as application/x-www-form-urlencoded; freed like `url` */
	uint64_t deadline_ns;	 /* CLOCK_MONOTONIC */
	bool fresh;		 /* not over a connection that was kept */
	unsigned *progress;	 /* counted up when something has come; NULL: nobody asks */
	struct login *login;	 /* an own reference, and no other is used; NULL: the remote's */
	void (*done)(struct exchange *exchange); /* not when blocking */

	/* The answer. */
	int result; /* 0 or a negative errno, with what follows */
	enum fetch_failure failure;
	uint32_t retry_after_ms;
	struct complaint complaint;
	bool cut; /* no whole answer came: its connection may be dead */
	struct answer answer;
	char *text; /* the body, with a NUL; cleared and freed by exchange_clear() */
	size_t text_length;

	/* Its own. */
	struct transfer transfer;
	struct exchange *next_waiting;
	char *location; /* where it was redirected to */
	struct curl_slist *headers;
	struct answer_verdict verdict;
	struct complaint reason;
	char error[CURL_ERROR_SIZE];
	uint32_t received;  /* bytes, of the range */
	size_t thrown_away; /* bytes, of a body that is not wanted */
	unsigned redirects;
	bool own_login, judged, waiting, renewed, too_long;
};

/* Blocking, or with done() on the fetcher's thread, perhaps before this returns. */
void exchange_start(struct exchange *exchange);
/* Gives up: done() is called, with -ECANCELED. Not for blocking ones. */
void exchange_cancel(struct exchange *exchange);
/* Frees what the answer has. */
void exchange_clear(struct exchange *exchange);

/* For the login's part: done with that, or not. */
void exchange_login_ready(struct exchange *exchange, struct login *login);
void exchange_login_failed(struct exchange *exchange, int err, enum fetch_failure failure,
			   const struct complaint *complaint);
/* Wait for the remote's login; one of the above follows. */
void login_wait(struct exchange *exchange);
void login_wait_no_more(struct exchange *exchange);

#endif
