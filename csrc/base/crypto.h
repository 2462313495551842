/* SPDX-License-Identifier: MIT */
#pragma once

#include <openssl/crypto.h>
#include <stdbool.h>

/*
 * Whether OpenSSL has what it makes once. NB: OpenSSL 3.0 crashes when a digest is looked up after
 * there was no memory for that, so ask before the first one.
 */
static inline bool crypto_is_ready(void)
{
	return OSSL_LIB_CTX_get0_global_default() != NULL;
}
