/* SPDX-License-Identifier: MIT */
/*
 * What all mirrors behind HTTP share: certificates, a proxy, and a login. The login is read from
 * files (or obtained from a token server) when it is needed, and again when it has become old or is
 * refused.
 */
#pragma once

#include <curl/curl.h>
#include <jansson.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/clock.h"
#include "base/error.h"
#include "content/source.h"
#include "fetch/mirror/response.h"
#include "fetch/mirror/secret.h"
#include "fetch/mirror/token.h"

struct exchange;
struct login_load;
struct remote;
struct x509_store_st;

enum { REMOTE_TEXT_BYTES = 512 /* fits the scheme, host, port and path of a URL, cut */ };

/* What is sent with a request. Once it is complete, only the fields under the lock change. */
struct login {
	uint64_t number;		    /* no other login of this process has the same */
	struct secret ca, certificate, key; /* PEM */
	/* The system's certificates (trust.h), where TLS needs them; whether they were looked for. */
	struct x509_store_st *trusted;
	bool trust_known;
	struct curl_slist *headers; /* for the mirror's own host only */
	char *user, *password;
	char *url;	/* of the object, if the URL is a secret; NULL: the exchange has it */
	bool send_user; /* send it as Basic; for kinds that do not always do that */
	/*
	 * CLOCK_MONOTONIC: when to make another one, until when it is sent meanwhile, and when that
	 * was last tried; under remote->lock.
	 */
	uint64_t until_ns, end_ns, tried_ns;
	unsigned references; /* under remote->lock */
};

struct remote_ops {
	/*
	 * Reads the kind's credentials, on a worker, after the common files. Returns 0, or a
	 * negative errno with the error filled in. May be NULL.
	 */
	int (*load)(struct remote *remote, struct login *login, struct error *error);
	/*
	 * Then, on any thread: prepares a request that obtains the login. Sets its URL, which the
	 * exchange frees, and what goes with it. Returns 1, 0 when no request is needed, or a
	 * negative errno.
	 */
	int (*ask)(struct remote *remote, struct login *login, struct exchange *exchange,
		   struct error *error);
	/* Takes the login from the response's text. */
	int (*answered)(struct remote *remote, struct login *login, const char *text,
			struct error *error);
	/* Returns whether another login may help after a request was refused. NULL: never. */
	bool (*refused)(struct remote *remote, const struct response *response);
	/*
	 * Says why a request was refused, as the beginning of the response's body has it: what
	 * follows the status. NULL: no body of the kind says that in a known form.
	 */
	void (*explain)(const char *body, struct error *error);
	/* Makes the last settings of a request to the mirror's own host. May be NULL. */
	void (*prepare)(const struct remote *remote, const struct login *login, CURL *easy);
};

/* A cache in front of a mirror; see docs/design/hosts.md. */
struct via {
	char *url;	 /* scheme, host and port */
	uint64_t weight; /* for this object */
};

/* The first member of the private data of each kind. */
struct remote {
	const struct remote_ops *ops;
	char *ca_file, *client_cert, *client_key; /* paths, or NULL */
	char *proxy;				  /* "": no proxy; NULL: that of the environment */
	/* how often files are read again; 0: there are none */
	uint32_t reload_ms;
	struct via *via; /* the one with the most weight first */
	unsigned via_count;
	bool via_plain; /* credentials may go to caches without TLS */

	/* Its server has answered to its own date as if that was another. For the fetcher's thread. */
	bool doubts_dates;

	uint32_t number; /* only for the fetch process: what the server calls it */
	/* The helper's answer that it has had, and that was refused (helper.h). For ops->load(). */
	uint64_t helper_seen;
	char *keys; /* its own, as JSON; only where remote_hooks.keeps_keys */

	pthread_mutex_t lock;
	struct login *login;	 /* the newest */
	struct login_load *load; /* being made; only for the fetcher's thread */
	bool refused;		 /* the last one was sent, and is no good; under the lock */
	/* Of a token that the host shares: what it is for, whether one is wanted; under the lock. */
	char token_key[TOKEN_KEY_BYTES];
	bool wants_token;
	bool wants_trust;	/* see login_want_trust(); under the lock */
	uint64_t token_refused; /* the number of the one that is no good; 0: none is */
};

/* What one of two processes, a server and its fetch process, has the other one do. */
struct remote_hooks {
	/* Fills the login in, on a worker, instead of reading files and calling ops->load(). */
	int (*read)(struct remote *remote, struct login *login, struct error *error);
	/* Tells of a token that was asked for, as remote_tell_token(), instead of token_tell(). */
	void (*tell)(struct fetcher *fetcher, struct remote *remote, const char *token,
		     const char *why, bool refused, uint64_t until_ns);
	bool keeps_keys; /* of remotes, for the other process */
};
/* To be set before there are remotes, or other threads. */
extern struct remote_hooks remote_hooks;

/* What has become of a token that was asked for; NULL: there is none. */
void remote_tell_token(struct fetcher *fetcher, struct remote *remote, const char *token,
		       const char *why, bool refused, uint64_t until_ns);

/* Takes "ca_file", "client_cert", "client_key", "proxy", "via" and "via_plain". */
int remote_parse(struct remote *remote, const struct remote_ops *ops, json_t *keys,
		 struct error *error);
void remote_close(struct remote *remote);
/*
 * via.c: to be called when all keys have been taken. `url` names the object, or is the path of a
 * file that does. `secret`: credentials are sent for it. Without caches of its own, it gets those of
 * the server's rules. Returns 0, -EINVAL with the error filled in, or -ENOMEM.
 */
int remote_settle_caches(struct remote *remote, const char *url, bool secret, struct error *error);
/* Is the `cache` of kinds. */
const char *remote_cache(const struct mirror *mirror, unsigned number, uint64_t *weight);
int remote_take_caches(struct remote *remote, json_t *keys, struct error *error);
void remote_free_caches(struct remote *remote);
/* Takes the path of a file. It must be absolute, since users do not know the server's directory. */
int remote_take_path(json_t *keys, const char *key, char **path, struct error *error);

/*
 * Checks a URL: http or https, with a host, and without user, password and fragment. Returns 0, or
 * -EINVAL with the error filled in, which contains neither password nor query.
 */
int url_check(const char *url, const char *key, struct error *error);
/* Writes scheme, host, port and path to `text`: what may be logged. */
const char *url_text(const char *url, char text[static REMOTE_TEXT_BYTES]);
/* Writes "host:port" to `text`. */
const char *url_host(const char *url, char *text, size_t bytes);
/* Whether credentials for one may be sent to the other. */
bool url_same_origin(const char *one, const char *other);
bool url_is_https(const char *url);
/* Whether the host is localhost, 127.0.0.0/8 or ::1, without looking up names. */
bool url_is_loopback(const char *url);

/*
 * Take and give back a reference. login_current() returns NULL when there is none, or it is too
 * old; `due`: it is time to make another one, though this one is still good.
 */
struct login *login_current(struct remote *remote, bool *due);
void login_put(struct remote *remote, struct login *login);
/*
 * To be called when no other login could be made. Returns a reference to the last one, however old,
 * and makes it current for a short time. Returns NULL when there is none, or it was refused.
 */
struct login *login_keep(struct remote *remote);
/* The same, where the renewal of a good one has failed: it is tried again a little later. */
void login_put_off(struct remote *remote);
/* To be called when it was refused: the next request makes another one. */
void login_drop(struct remote *remote, const struct login *login);
/*
 * To be called when a server's certificate was refused, or the client's cannot be used: the files
 * may be others now. The next request makes another login, but not sooner than some seconds after
 * that was last tried.
 */
void login_distrust(struct remote *remote, struct login *login);
/*
 * A server refused the token of this number (0: the login had none). The next login that is read
 * has another token, and asks its helper again.
 */
void login_is_refused(struct remote *remote, uint64_t token);
/* Returns the token that is sent with it, or NULL. */
const char *login_token(const struct login *login);
/*
 * Reads the files and calls ops->load(), on a worker. Returns 0 and a login with one reference, or
 * a negative errno with the error filled in.
 */
int login_read(struct remote *remote, struct login **login, struct error *error);
/*
 * Logins that are read from now on have the system's certificates. Reading these takes 10 to 20 ms
 * of CPU time, so nobody does who asks without TLS.
 */
void login_want_trust(struct remote *remote);
/* Gives them to a login that has none of its own, if they are wanted. To be called on a worker. */
void login_trust(struct remote *remote, struct login *login);
/* Makes a complete login the current one. */
void login_publish(struct remote *remote, struct login *login);
/* Adds a header, printf()-like. Returns 0 or -ENOMEM. */
int login_add_header(struct login *login, const char *format, ...)
	__attribute__((format(printf, 2, 3)));
