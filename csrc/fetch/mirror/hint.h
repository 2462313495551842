/* SPDX-License-Identifier: MIT */
/*
 * Hints for sources that cannot be read, in one table by what has happened. A doubtful hint is left
 * out. Keys are named as in descriptions and volume definitions.
 */
#pragma once

#include <curl/curl.h>
#include <stdbool.h>

/* How a request has failed. */
struct failed_request {
	const char *kind; /* of mirror */
	CURLcode code;	  /* CURLE_OK: there was a response */
	long verify;	  /* CURLINFO_SSL_VERIFYRESULT */
	unsigned status;  /* HTTP; 0: there was no response */
	bool coded;	  /* the response has a Content-Encoding */
};

/* Returns NULL when no hint fits. */
const char *hint_for_request(const struct failed_request *failed);
/* Return a hint for a file that is a source, or has credentials; `err` is a negative errno. */
const char *hint_for_source_file(int err);
const char *hint_for_secret_file(int err);
