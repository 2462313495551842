/* SPDX-License-Identifier: MIT */
#include "fetch/mirror/trust.h"

#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/ssl.h>
#include <pthread.h>
#include <stdint.h>

#include "base/cleanup.h"
#include "base/clock.h"
#include "base/error.h"
#include "fetch/mirror/secret.h"

#define TRUST_FOR_NS (300 * 1000000000ull)

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static X509_STORE *newest;
static uint64_t newest_until_ns;

/* Returns how many were added. */
static unsigned add_all(X509_STORE *store, BIO *text)
{
	unsigned count = 0;
	X509 *certificate;

	while ((certificate = PEM_read_bio_X509_AUX(text, NULL, NULL, NULL))) {
		count += X509_STORE_add_cert(store, certificate) == 1;
		X509_free(certificate);
	}
	/* The end of the file is an error in this thread's list; remove it. */
	ERR_clear_error();
	return count;
}

static X509_STORE *parse(const struct secret *file)
{
	BIO *text = BIO_new_mem_buf(file->text, (int)file->length);
	X509_STORE *store = X509_STORE_new();
	unsigned count = text && store ? add_all(store, text) : 0;

	BIO_free(text);
	if (!count) {
		X509_STORE_free(store);
		return NULL;
	}
	/* As libcurl does: a certificate that is in the file is trusted, without a look at its issuer. */
	X509_STORE_set_flags(store, X509_V_FLAG_TRUSTED_FIRST | X509_V_FLAG_PARTIAL_CHAIN);
	return store;
}

/* Keeps the old certificates when the file cannot be read any more. */
static void read_newest(const char *path)
{
	_cleanup_(secret_clear) struct secret file = {};
	struct error unused = {};
	X509_STORE *store;

	if (newest && clock_now_ns() < newest_until_ns)
		return;
	store = secret_read(path, false, &file, &unused) ? NULL : parse(&file);
	if (!store)
		return;
	X509_STORE_free(newest);
	newest = store;
	newest_until_ns = clock_now_ns() + TRUST_FOR_NS;
}

struct x509_store_st *trust_get(void)
{
	const char *path = curl_version_info(CURLVERSION_NOW)->cainfo;
	X509_STORE *store;

	if (!path)
		return NULL;
	pthread_mutex_lock(&lock);
	read_newest(path);
	store = newest;
	if (store)
		X509_STORE_up_ref(store);
	pthread_mutex_unlock(&lock);
	return store;
}

void trust_put(struct x509_store_st *store)
{
	X509_STORE_free(store);
}

static CURLcode on_context(CURL *easy, void *context, void *store)
{
	SSL_CTX_set1_cert_store(context, store);
	return CURLE_OK;
}

void trust_set(struct x509_store_st *store, CURL *easy)
{
	if (!store)
		return;
	curl_easy_setopt(easy, CURLOPT_CAINFO, NULL);
	curl_easy_setopt(easy, CURLOPT_CAPATH, NULL);
	/* libcurl calls on_context() for the connection to a proxy too. */
	curl_easy_setopt(easy, CURLOPT_PROXY_CAINFO, NULL);
	curl_easy_setopt(easy, CURLOPT_PROXY_CAPATH, NULL);
	curl_easy_setopt(easy, CURLOPT_SSL_CTX_FUNCTION, on_context);
	curl_easy_setopt(easy, CURLOPT_SSL_CTX_DATA, store);
}
