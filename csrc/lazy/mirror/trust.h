/* SPDX-License-Identifier: MIT */
/*
 * The system's certificates, for servers of TLS. libcurl would read their file on the fetcher's thread,
 * which may have to answer that very read; so a hand reads it, and all mirrors share it.
 */
#ifndef LAZY_MIRROR_TRUST_H
#define LAZY_MIRROR_TRUST_H

#include <curl/curl.h>

struct x509_store_st;

/*
 * On a hand: the certificates, as they were 5 minutes ago at most; with a reference that trust_put() takes.
 * NULL: there are none, which libcurl will complain of when it wants to know a server.
 */
struct x509_store_st *trust_get(void);
void trust_put(struct x509_store_st *store);

/* Has `easy` trust them, in the place of what it would read itself. NULL: nothing. */
void trust_set(struct x509_store_st *store, CURL *easy);

#endif
