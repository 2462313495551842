/* SPDX-License-Identifier: MIT */
/*
 * libcurl on the fetcher's loop. All mirrors share and reuse connections, with HTTP/2 where the
 * server has it and a limit per host. mirror/exchange.h makes the requests and checks the
 * responses.
 */
#pragma once

#include <curl/curl.h>
#include <stdbool.h>

#define TRANSFER_USER_AGENT "btrfs-ublk/" BTRFS_UBLK_VERSION

enum {
	/* HTTP/1.1 handles one request per connection at a time, and a distant host needs many. */
	TRANSFER_HOST_CONNECTIONS = 64,
	TRANSFER_IDLE_CONNECTIONS = 64,
	/* A connection that is slower for TRANSFER_LOW_SPEED_S is taken for dead. */
	TRANSFER_LOW_SPEED_BYTES_PER_S = 1 << 10,
	TRANSFER_LOW_SPEED_S = 15,
};

struct fetcher;

struct transfer {
	/* Set by the caller. */
	CURL *easy; /* from transfer_easy() */
	/*
	 * Called on the fetcher's thread when the transfer is over, and never from within
	 * transfer_start().
	 */
	void (*done)(struct transfer *transfer, CURLcode code);
	/* Only connects (CURLOPT_CONNECT_ONLY), and leaves the connection in `fd`. */
	bool connects;
	int fd; /* of the connection, the caller's own; -1: there is none */

	/* Its own. */
	CURLM *multi; /* NULL: it does not run */
	struct curl_slist *forgotten;
};

/* Initializes libcurl once per process, on any thread: libcurl and its TLS library read files. */
void transfer_init(void);
/*
 * Returns a handle with the settings that all transfers share; the caller adds the others. NULL: no
 * memory.
 */
CURL *transfer_easy(void);

/* Starts a transfer, on the fetcher's thread. Returns 0 or a negative errno. */
int transfer_start(struct transfer *transfer, struct fetcher *fetcher);
/* Stops it, on the same thread. done() is not called any more. */
void transfer_stop(struct transfer *transfer);
