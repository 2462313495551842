/* SPDX-License-Identifier: MIT */
#include "fetch/mirror/hint.h"

#include <errno.h>
#include <openssl/x509_vfy.h>
#include <stddef.h>
#include <string.h>

/* The first row that matches counts. */
static const struct {
	const char *kind; /* NULL: any */
	unsigned first, last;
	const char *hint;
} of_status[] = {
	{ NULL, 200, 200, "the server, or a proxy, does not know range requests" },
	{ NULL, 300, 399,
	  "redirects are followed to http and https, not from https to http, 8 at most: name the URL "
	  "that it ends at" },
	{ "http", 401, 401,
	  "the server wants a login: name a \"basic_auth_file\" or a \"bearer_token_file\", or correct "
	  "its content" },
	{ "http", 403, 403,
	  "the server gives it to other users only: name a \"basic_auth_file\" or a \"bearer_token_file\", or renew a "
	  "signed URL" },
	{ "s3", 401, 401, "check the keys in \"credentials_file\"" },
	{ "s3", 403, 403,
	  "check the keys in \"credentials_file\", what they may read, and \"region\"" },
	{ "oci", 401, 403,
	  "the registry wants a login: name a \"docker_config\", or correct its content" },
	{ NULL, 407, 407,
	  "the proxy wants a login: leave \"proxy\" out, and give its URL, with user and password, in the "
	  "environment of the server: http_proxy, https_proxy" },
	{ "s3", 404, 410, "the store has no such object: check \"bucket\" and \"key\"" },
	{ "oci manifest", 401, 403,
	  "the registry wants a login: name a \"docker_config\", or correct its content" },
	{ "oci manifest", 404, 410,
	  "the registry has no such image: check \"repository\" and \"tag\"" },
	{ "oci", 404, 410, "the registry has no such blob: check \"repository\" and \"digest\"" },
	{ NULL, 404, 410, "the server has nothing of that name: check the path in the URL" },
	{ NULL, 429, 429, "the server has too much to do: try again later" },
	{ NULL, 503, 503, "the server does not serve at the moment: try again later" },
	{ NULL, 500, 599, "the server has failed: its log may say why" },
};

static const struct {
	CURLcode code;
	const char *hint;
} of_transfer[] = {
	{ CURLE_COULDNT_RESOLVE_HOST, "check the name of the host" },
	{ CURLE_COULDNT_RESOLVE_PROXY,
	  "check \"proxy\", or http_proxy and https_proxy in the environment of the server" },
	{ CURLE_COULDNT_CONNECT, "does the server run, and on that port?" },
	{ CURLE_OPERATION_TIMEDOUT, "does the server run, and can this machine reach it?" },
	{ CURLE_SSL_CONNECT_ERROR, "does it speak TLS on that port? If not, write http://" },
	{ CURLE_WEIRD_SERVER_REPLY, "is it an HTTP server? If it speaks TLS, write https://" },
	{ CURLE_UNSUPPORTED_PROTOCOL, "is it an HTTP server? If it speaks TLS, write https://" },
	{ CURLE_SSL_CACERT_BADFILE, "check \"ca_file\": certificates to trust, PEM" },
	{ CURLE_SSL_CERTPROBLEM, "check \"client_cert\" and \"client_key\", PEM" },
};

/* Another name, or an expired certificate, does not become right by trusting it. */
static bool is_unknown_issuer(const struct failed_request *failed)
{
	switch (failed->verify) {
	case X509_V_ERR_UNABLE_TO_GET_ISSUER_CERT:
	case X509_V_ERR_DEPTH_ZERO_SELF_SIGNED_CERT:
	case X509_V_ERR_SELF_SIGNED_CERT_IN_CHAIN:
	case X509_V_ERR_UNABLE_TO_GET_ISSUER_CERT_LOCALLY:
	case X509_V_ERR_UNABLE_TO_VERIFY_LEAF_SIGNATURE:
		return failed->code == CURLE_PEER_FAILED_VERIFICATION;
	default:
		return false;
	}
}

const char *hint_for_request(const struct failed_request *failed)
{
	if (is_unknown_issuer(failed))
		return "if it is the right server, name its certificate, or that of who signed it, as "
		       "\"ca_file\" (PEM)";
	for (size_t i = 0; i < sizeof(of_transfer) / sizeof(*of_transfer); i++) {
		if (failed->code == of_transfer[i].code)
			return of_transfer[i].hint;
	}
	if (failed->code != CURLE_OK)
		return NULL;
	if (failed->coded && failed->status < 300)
		return "the server, or a proxy, compresses what it sends: turn that off for this path";
	for (size_t i = 0; i < sizeof(of_status) / sizeof(*of_status); i++) {
		if ((!of_status[i].kind || !strcmp(of_status[i].kind, failed->kind)) &&
		    failed->status >= of_status[i].first && failed->status <= of_status[i].last)
			return of_status[i].hint;
	}
	return NULL;
}

const char *hint_for_source_file(int err)
{
	switch (err) {
	case -ENOENT:
	case -ENOTDIR:
		return "check the path, which is looked up on this machine";
	case -EISDIR:
		return "name one file in it; each file is a source";
	default:
		return NULL;
	}
}

const char *hint_for_secret_file(int err)
{
	switch (err) {
	case -ENOENT:
	case -ENOTDIR:
		return "make it, with mode 600, or name the right one";
	case -EACCES:
		return "it must belong to root, or to the user that the server runs as";
	default:
		return NULL;
	}
}
