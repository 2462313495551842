/* SPDX-License-Identifier: MIT */
/*
 * What all mirrors behind HTTP have: certificates, a proxy, and a login, which is read from files (or got from
 * a token server) when it is needed, and again when it is older than that or is refused.
 */
#ifndef LAZY_MIRROR_REMOTE_H
#define LAZY_MIRROR_REMOTE_H

#include <curl/curl.h>
#include <jansson.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/clock.h"
#include "lazy/complaint.h"
#include "lazy/mirror/answer.h"
#include "lazy/mirror/secret.h"
#include "lazy/source.h"

struct exchange;
struct login_load;
struct remote;
struct x509_store_st;

enum { REMOTE_TEXT_BYTES = 512 /* scheme, host, port and path of a URL, cut */ };

/* What goes with a request. Once it is complete, nothing of it changes but what the lock guards. */
struct login {
	struct secret ca, certificate, key; /* PEM */
	struct x509_store_st *trusted;	    /* without `ca`: the system's; trust.h */
	struct curl_slist *headers;	    /* for the mirror's own host only */
	char *user, *password;
	bool send_user;	     /* as Basic, for the kinds that do not always */
	uint64_t until_ns;   /* CLOCK_MONOTONIC: when it is to be made anew; under remote->lock */
	unsigned references; /* the same */
};

struct remote_ops {
	/*
	 * On a hand: read the credentials; the common files are read already. Returns 0 or a negative
	 * errno with the complaint filled in. NULL: none.
	 */
	int (*load)(struct remote *remote, struct login *login, struct complaint *complaint);
	/*
	 * Then, on any thread: a request that the login has to be got with. Set its URL (which the
	 * exchange takes), and what goes with it. Returns 1, 0 (none is needed), or a negative errno.
	 */
	int (*ask)(struct remote *remote, struct login *login, struct exchange *exchange,
		   struct complaint *complaint);
	/* Its answer's text. */
	int (*answered)(struct remote *remote, struct login *login, const char *text,
			struct complaint *complaint);
	/* A request was refused: whether a new login may do better. NULL: no. */
	bool (*refused)(struct remote *remote, const struct answer *answer);
	/* Last settings of a request to the mirror's own host. NULL: none. */
	void (*prepare)(const struct remote *remote, const struct login *login, CURL *easy);
};

/* The first member of the private data of each kind. */
struct remote {
	const struct remote_ops *ops;
	char *ca_file, *client_cert, *client_key; /* paths, or NULL */
	char *proxy;				  /* "": none; NULL: as the environment says */
	uint32_t
		reload_ms; /* how long files are believed to be what they were; 0: there are none */

	pthread_mutex_t lock;
	struct login *login;	 /* the newest */
	struct login_load *load; /* the fetcher's thread only: the next one */
};

/* Takes "ca_file", "client_cert", "client_key" and "proxy". */
int remote_parse(struct remote *remote, const struct remote_ops *ops, json_t *keys,
		 struct complaint *complaint);
void remote_close(struct remote *remote);
/* Takes a path of a file: absolute, since nobody knows this server's directory. */
int remote_take_path(json_t *keys, const char *key, char **path, struct complaint *complaint);

/*
 * Check a URL: http or https, a host, no user or password, no fragment. Returns 0, or -EINVAL with the
 * complaint filled in, which has neither password nor query.
 */
int url_check(const char *url, const char *key, struct complaint *complaint);
/* Scheme, host, port and path: what may be logged. */
const char *url_text(const char *url, char text[static REMOTE_TEXT_BYTES]);
/* "host:port", in `text`. */
const char *url_host(const char *url, char *text, size_t bytes);
/* Whether credentials for one may be given to the other. */
bool url_same_origin(const char *one, const char *other);
bool url_is_https(const char *url);
/* localhost, 127.0.0.0/8, ::1, by its text: no name is looked up. */
bool url_is_loopback(const char *url);

/* Each takes or gives back a reference. NULL: there is none, or it is too old. */
struct login *login_current(struct remote *remote);
void login_put(struct remote *remote, struct login *login);
/*
 * Another one could not be made: a reference to the last one, however old, which is the current one for a
 * short time more. NULL: there is none, or it was refused.
 */
struct login *login_keep(struct remote *remote);
/* It was refused: the next request has another one made. */
void login_drop(struct remote *remote, const struct login *login);
/*
 * On a hand: the files and ops->load(). Returns 0 and a login with one reference, or a negative errno with
 * the complaint filled in.
 */
int login_read(struct remote *remote, struct login **login, struct complaint *complaint);
/* It is complete, and the newest. */
void login_publish(struct remote *remote, struct login *login);
/* printf()-like: one more header. Returns 0 or -ENOMEM. */
int login_add_header(struct login *login, const char *format, ...)
	__attribute__((format(printf, 2, 3)));

#endif
