/* SPDX-License-Identifier: MIT */
/*
 * The system's certificates, to verify TLS servers. libcurl would read their file on the fetcher's
 * thread, which may have to answer that very read. So a worker reads it, for all mirrors, once one of
 * them is asked by TLS.
 */
#pragma once

#include <curl/curl.h>

struct x509_store_st;

/*
 * Returns the certificates, at most 5 minutes old, with a reference for trust_put(). To be called
 * on a worker. Returns NULL when there are none, which libcurl reports when it verifies a server.
 */
struct x509_store_st *trust_get(void);
void trust_put(struct x509_store_st *store);

/* Makes `easy` use them instead of reading its own. Does nothing with NULL. */
void trust_set(struct x509_store_st *store, CURL *easy);
