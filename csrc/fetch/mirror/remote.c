/* SPDX-License-Identifier: MIT */
#include "fetch/mirror/remote.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/cleanup.h"
#include "base/json_text.h"
#include "base/keys.h"
#include "fetch/mirror/trust.h"
#include "fetch/transfer.h"

enum {
	RELOAD_MS = 5000,
	/* The same for a mirror without files of its own: only the system's certificates (trust.h). */
	SHARED_RELOAD_MS = 300000,
	/* The most that one is sent longer, while another one is got from a token server. */
	LOGIN_SPARE_MS = 25000,
};

struct remote_hooks remote_hooks;

void remote_tell_token(struct fetcher *fetcher, struct remote *remote, const char *token,
		       const char *why, bool refused, uint64_t until_ns)
{
	char key[TOKEN_KEY_BYTES];

	if (remote_hooks.tell) {
		remote_hooks.tell(fetcher, remote, token, why, refused, until_ns);
		return;
	}
	pthread_mutex_lock(&remote->lock);
	memcpy(key, remote->token_key, sizeof(key));
	pthread_mutex_unlock(&remote->lock);
	if (*key)
		token_tell(fetcher, key, token, why, refused, until_ns);
}

int remote_take_path(json_t *keys, const char *key, char **path, struct error *error)
{
	int err = keys_take_string(keys, key, false, path, error);

	if (!err && *path && **path != '/') {
		err = error_set(error, -EINVAL, "\"%s\" is '%s', no absolute path", key, *path);
		error_set_hint(error, "the server that reads it has another working directory");
	}
	return err;
}

static int take_proxy(struct remote *remote, json_t *keys, struct error *error)
{
	int err = keys_take_string(keys, "proxy", false, &remote->proxy, error);

	if (err || !remote->proxy)
		return err;
	if (!strcmp(remote->proxy, "none")) {
		*remote->proxy = 0;
		return 0;
	}
	return url_check(remote->proxy, "proxy", error);
}

int remote_parse(struct remote *remote, const struct remote_ops *ops, json_t *keys,
		 struct error *error)
{
	int err;

	pthread_mutex_init(&remote->lock, NULL);
	remote->ops = ops;
	remote->reload_ms = RELOAD_MS;
	if (remote_hooks.keeps_keys) {
		remote->keys = json_text_dump(keys, JSON_COMPACT);
		if (!remote->keys)
			return error_set(error, -ENOMEM, "no memory for a mirror");
	}
	err = remote_take_path(keys, "ca_file", &remote->ca_file, error);
	if (!err)
		err = remote_take_path(keys, "client_cert", &remote->client_cert, error);
	if (!err)
		err = remote_take_path(keys, "client_key", &remote->client_key, error);
	if (!err)
		err = take_proxy(remote, keys, error);
	if (!err)
		err = remote_take_caches(remote, keys, error);
	if (err)
		return err;
	if (remote->client_key && !remote->client_cert)
		return error_set(error, -EINVAL, "\"client_key\" without \"client_cert\"");
	if (remote->client_cert)
		secret_guard_process();
	return 0;
}

static void free_headers(struct curl_slist *headers)
{
	for (const struct curl_slist *header = headers; header; header = header->next)
		explicit_bzero(header->data, strlen(header->data));
	curl_slist_free_all(headers);
}

static void free_login(struct login *login)
{
	if (!login)
		return;
	secret_clear(&login->ca);
	trust_put(login->trusted);
	secret_clear(&login->certificate);
	secret_clear(&login->key);
	free_headers(login->headers);
	secret_free(login->user);
	secret_free(login->password);
	secret_free(login->url);
	free(login);
}

void remote_close(struct remote *remote)
{
	free_login(remote->login);
	secret_free(remote->keys); /* a URL may contain a signature */
	free(remote->ca_file);
	free(remote->client_cert);
	free(remote->client_key);
	free(remote->proxy);
	remote_free_caches(remote);
}

struct login *login_current(struct remote *remote, bool *due)
{
	uint64_t now_ns = clock_now_ns();
	struct login *login;

	pthread_mutex_lock(&remote->lock);
	login = remote->login;
	if (login && now_ns >= login->end_ns)
		login = NULL;
	if (login)
		login->references++;
	*due = login && now_ns >= login->until_ns;
	pthread_mutex_unlock(&remote->lock);
	return login;
}

/* The next attempt to make another one is some time after this. Under the lock. */
static void put_off(struct login *login)
{
	login->tried_ns = clock_now_ns();
	login->until_ns = login->tried_ns + (uint64_t)RELOAD_MS * 1000000;
}

void login_put_off(struct remote *remote)
{
	pthread_mutex_lock(&remote->lock);
	if (remote->login)
		put_off(remote->login);
	pthread_mutex_unlock(&remote->lock);
}

struct login *login_keep(struct remote *remote)
{
	struct login *login;

	pthread_mutex_lock(&remote->lock);
	login = remote->login;
	if (login) {
		put_off(login);
		if (login->end_ns < login->until_ns)
			login->end_ns = login->until_ns;
		login->references++;
	}
	pthread_mutex_unlock(&remote->lock);
	return login;
}

static struct login *unreference(struct login *login)
{
	return login && !--login->references ? login : NULL;
}

void login_put(struct remote *remote, struct login *login)
{
	pthread_mutex_lock(&remote->lock);
	login = unreference(login);
	pthread_mutex_unlock(&remote->lock);
	free_login(login);
}

void login_drop(struct remote *remote, const struct login *login)
{
	struct login *last = NULL;

	pthread_mutex_lock(&remote->lock);
	if (remote->login == login) {
		last = unreference(remote->login);
		remote->login = NULL;
	}
	pthread_mutex_unlock(&remote->lock);
	free_login(last);
}

void login_distrust(struct remote *remote, struct login *login)
{
	uint64_t until_ns;

	pthread_mutex_lock(&remote->lock);
	until_ns = login->tried_ns + (uint64_t)RELOAD_MS * 1000000;
	if (login->until_ns > until_ns)
		login->until_ns = until_ns;
	login->end_ns = login->until_ns;
	pthread_mutex_unlock(&remote->lock);
}

const char *login_token(const struct login *login)
{
	const char *header = login->headers ? login->headers->data : "";
	size_t length = strlen(TOKEN_HEADER);

	return strncmp(header, TOKEN_HEADER, length) ? NULL : header + length;
}

void login_is_refused(struct remote *remote, uint64_t token)
{
	pthread_mutex_lock(&remote->lock);
	remote->refused = true;
	remote->token_refused = token;
	pthread_mutex_unlock(&remote->lock);
}

void login_publish(struct remote *remote, struct login *login)
{
	uint64_t now_ns = clock_now_ns(), spare_ns;
	struct login *last;

	pthread_mutex_lock(&remote->lock);
	/* NB: until_ns is before its end by more than that; see oci_answered(). */
	spare_ns = login->until_ns > now_ns ? (login->until_ns - now_ns) / 4 : 0;
	if (spare_ns > LOGIN_SPARE_MS * NS_PER_MS)
		spare_ns = LOGIN_SPARE_MS * NS_PER_MS;
	login->end_ns = login->until_ns + (remote->ops->ask ? spare_ns : 0);
	last = unreference(remote->login);
	remote->login = login;
	login->references++;
	pthread_mutex_unlock(&remote->lock);
	free_login(last);
}

void login_want_trust(struct remote *remote)
{
	pthread_mutex_lock(&remote->lock);
	remote->wants_trust = true;
	pthread_mutex_unlock(&remote->lock);
}

void login_trust(struct remote *remote, struct login *login)
{
	pthread_mutex_lock(&remote->lock);
	login->trust_known = remote->wants_trust;
	pthread_mutex_unlock(&remote->lock);
	if (login->trust_known && !login->ca.text)
		login->trusted = trust_get();
}

static int read_files(struct remote *remote, struct login *login, struct error *error)
{
	int err = 0;

	pthread_mutex_lock(&remote->lock);
	if (!remote->refused) {
		remote->helper_seen = 0;
		remote->token_refused = 0;
	}
	remote->refused = false;
	pthread_mutex_unlock(&remote->lock);
	if (remote->ca_file)
		err = secret_read(remote->ca_file, false, &login->ca, error);
	else
		login_trust(remote, login);
	/* Without a key file, the certificate's file has the key. */
	if (!err && remote->client_cert)
		err = secret_read(remote->client_cert, !remote->client_key, &login->certificate,
				  error);
	if (!err && remote->client_key)
		err = secret_read(remote->client_key, true, &login->key, error);
	if (!err && remote->ops->load)
		err = remote->ops->load(remote, login, error);
	return err;
}

int login_read(struct remote *remote, struct login **login, struct error *error)
{
	static uint64_t logins;
	struct login *made = calloc(1, sizeof(*made));
	int err;

	if (!made)
		return error_set(error, -ENOMEM, "no memory for a login");
	/* This also reads files, so it must not happen later on the fetcher's thread. */
	transfer_init();
	made->number = __atomic_add_fetch(&logins, 1, __ATOMIC_RELAXED);
	made->references = 1;
	made->tried_ns = clock_now_ns();
	made->until_ns =
		made->tried_ns + (uint64_t)(remote->reload_ms ?: SHARED_RELOAD_MS) * 1000000;
	err = (remote_hooks.read ?: read_files)(remote, made, error);
	if (err)
		free_login(made);
	else
		*login = made;
	return err;
}

int login_add_header(struct login *login, const char *format, ...)
{
	struct curl_slist *longer;
	char *text = NULL;
	va_list args;
	int length;

	va_start(args, format);
	length = vasprintf(&text, format, args);
	va_end(args);
	if (length < 0)
		return -ENOMEM;
	longer = curl_slist_append(login->headers, text);
	secret_free(text);
	if (!longer)
		return -ENOMEM;
	login->headers = longer;
	return 0;
}
