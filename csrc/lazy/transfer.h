/* SPDX-License-Identifier: MIT */
/*
 * libcurl on the fetcher's loop: connections are kept and shared by all mirrors, with HTTP/2 where the
 * server has it, and so many per host at most. What is asked and what an answer is worth is
 * mirror/exchange.h's.
 */
#ifndef LAZY_TRANSFER_H
#define LAZY_TRANSFER_H

#include <curl/curl.h>
#include <stdbool.h>

struct fetcher;

struct transfer {
	/* Set by the caller. */
	CURL *easy; /* of transfer_easy() */
	/* On the fetcher's thread, when it is over, and never from within transfer_start(). */
	void (*done)(struct transfer *transfer, CURLcode code);

	/* Its own. */
	CURLM *multi; /* NULL: it does not run */
};

/* Once per process, by whoever is first: libcurl and its TLS read files. Any thread. */
void transfer_init(void);
/* A handle with what holds for all transfers; the caller sets the rest. NULL: no memory. */
CURL *transfer_easy(void);

/* The fetcher's thread. Returns 0 or a negative errno. */
int transfer_start(struct transfer *transfer, struct fetcher *fetcher);
/* The same thread. done() is not called any more. */
void transfer_stop(struct transfer *transfer);

#endif
