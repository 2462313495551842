/* SPDX-License-Identifier: MIT */
/* What an exchange asks of libcurl, and of whom. */
#ifndef LAZY_MIRROR_EXCHANGE_REQUEST_H
#define LAZY_MIRROR_EXCHANGE_REQUEST_H

#include "lazy/mirror/exchange.h"

/* Where it has been sent by now. */
const char *exchange_url(const struct exchange *exchange);
/* Whether that is where it began: credentials go to nobody else. */
bool exchange_at_home(const struct exchange *exchange);
/* The address, the range, the form, the headers, the credentials. Returns 0 or -ENOMEM. */
int exchange_set_request(struct exchange *exchange, CURL *easy);

#endif
