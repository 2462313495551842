/* SPDX-License-Identifier: MIT */
/*
 * A blob of a container registry: `"registry"` (a host, and perhaps a port), `"repository"`, `"digest"`
 * ("sha256:..."), `"docker_config"` (a config.json; else Docker's own), `"insecure"` (http, on
 * loopback only). Certificates and proxy are of remote.h.
 *
 * The protocol: OCI distribution specification 1.1; its tokens: the "token authentication" of the
 * CNCF's distribution project.
 *
 * NB: the digest is the whole blob's. It names the blob, so there is no identity to pin; but it cannot
 * tell whether a part of it is right, which takes digests per unit.
 */
#include <ctype.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "lazy/keys.h"
#include "lazy/mirror/challenge.h"
#include "lazy/mirror/docker.h"
#include "lazy/mirror/exchange.h"
#include "lazy/mirror/object.h"

enum {
	/* Helpers take their time, so not too often. */
	OCI_RELOAD_MS = 300000,
	/* RFC 6749 has no default; this is what the token protocol says. */
	TOKEN_DEFAULT_S = 60,
	TOKEN_MARGIN_S = 30,
	TOKEN_MAX_S = 86400,
};

static const char hub[] = "docker.io";
static const char hub_host[] = "registry-1.docker.io";

struct oci_mirror {
	struct remote remote;
	char *registry, *repository, *digest, *docker_config;
	bool insecure;

	/* Under remote.lock: what the registry wants. */
	char *challenge; /* parameters of Bearer */
	bool basic;
};

static char *registry_url(const struct oci_mirror *oci)
{
	const char *host = strcmp(oci->registry, hub) ? oci->registry : hub_host;
	char *url = NULL;

	if (asprintf(&url, "http%s://%s/v2/%s/blobs/%s", oci->insecure ? "" : "s", host,
		     oci->repository, oci->digest) < 0)
		return NULL;
	return url;
}

static int oci_load(struct remote *remote, struct login *login, struct complaint *complaint)
{
	struct oci_mirror *oci = (struct oci_mirror *)remote;
	struct docker_login found = {};
	int err = docker_login_find(oci->docker_config, oci->registry, &found, complaint);

	if (err)
		return err;
	if (found.registry_token)
		err = login_add_header(login, "Authorization: Bearer %s", found.registry_token);
	login->user = found.user;
	login->password = found.identity_token ? found.identity_token : found.password;
	found.user = found.password = found.identity_token = NULL;
	docker_login_clear(&found);
	pthread_mutex_lock(&remote->lock);
	login->send_user = oci->basic && login->user;
	pthread_mutex_unlock(&remote->lock);
	return err;
}

static char *take_challenge(struct oci_mirror *oci)
{
	char *challenge;

	pthread_mutex_lock(&oci->remote.lock);
	challenge = oci->challenge ? strdup(oci->challenge) : NULL;
	pthread_mutex_unlock(&oci->remote.lock);
	return challenge;
}

static int check_realm(const struct oci_mirror *oci, const char *realm, struct complaint *complaint)
{
	char text[REMOTE_TEXT_BYTES];
	struct complaint unused = {};

	if (url_check(realm, "realm", &unused))
		return complain(complaint, -EPROTO, "%s names no URL to get a token from",
				oci->registry);
	/* The password goes there. */
	if (!url_is_https(realm) && !(oci->insecure && url_is_loopback(realm)))
		return complain(complaint, -EPROTO, "%s wants its token got without TLS, from %s",
				oci->registry, url_text(realm, text));
	return 0;
}

static int oci_ask(struct remote *remote, struct login *login, struct exchange *exchange,
		   struct complaint *complaint)
{
	struct oci_mirror *oci = (struct oci_mirror *)remote;
	struct challenge challenge = {};
	char *text;
	int err;

	if (login->headers || login->send_user)
		return 0;
	text = take_challenge(oci);
	if (!text)
		return 0; /* It has not asked for one. */
	err = challenge_parse(text, &challenge);
	free(text);
	if (err)
		return complain(complaint, -EPROTO,
				"%s asks for a token in a way that makes no sense", oci->registry);
	err = check_realm(oci, challenge.realm, complaint);
	if (!err &&
	    challenge_request(&challenge, oci->repository, login->user ? NULL : login->password,
			      &exchange->url, &exchange->form))
		err = complain(complaint, -ENOMEM, "no memory for a request");
	challenge_clear(&challenge);
	if (err)
		return err;
	login->send_user = login->user != NULL;
	pthread_mutex_lock(&remote->lock);
	login->references++;
	pthread_mutex_unlock(&remote->lock);
	exchange->login = login;
	return 1;
}

static int oci_answered(struct remote *remote, struct login *login, const char *text,
			struct complaint *complaint)
{
	const struct oci_mirror *oci = (const struct oci_mirror *)remote;
	json_t *answer = text ? json_loads(text, 0, NULL) : NULL;
	const char *token = json_string_value(json_object_get(answer, "token"));
	json_int_t life_s = json_integer_value(json_object_get(answer, "expires_in"));
	int err;

	if (!token)
		token = json_string_value(json_object_get(answer, "access_token"));
	if (!token || !*token || strpbrk(token, "\r\n")) {
		json_decref(answer);
		return complain(complaint, -EPROTO,
				"the token server of %s answers without a token", oci->registry);
	}
	if (life_s <= 0)
		life_s = TOKEN_DEFAULT_S;
	if (life_s > TOKEN_MAX_S)
		life_s = TOKEN_MAX_S;
	/* Early enough for what is on its way, and not at once again. */
	life_s -= life_s > 4 * TOKEN_MARGIN_S ? TOKEN_MARGIN_S : life_s / 4;
	login->until_ns = clock_now_ns() + (uint64_t)life_s * 1000000000;
	login->send_user = false;
	err = login_add_header(login, "Authorization: Bearer %s", token);
	json_decref(answer);
	return err ? complain(complaint, err, "no memory for a token") : 0;
}

static bool oci_refused(struct remote *remote, const struct answer *answer)
{
	struct oci_mirror *oci = (struct oci_mirror *)remote;
	bool known;

	if (answer->status != 401)
		return false;
	pthread_mutex_lock(&remote->lock);
	if (answer->bearer[0]) {
		free(oci->challenge);
		oci->challenge = strdup(answer->bearer);
	}
	oci->basic = answer->basic && !answer->bearer[0];
	known = oci->challenge || oci->basic;
	pthread_mutex_unlock(&remote->lock);
	return known;
}

static void oci_prepare(const struct remote *remote, const struct login *login, CURL *easy)
{
	(void)remote;
	if (!login->send_user)
		return;
	curl_easy_setopt(easy, CURLOPT_HTTPAUTH, (long)CURLAUTH_BASIC);
	curl_easy_setopt(easy, CURLOPT_USERNAME, login->user);
	curl_easy_setopt(easy, CURLOPT_PASSWORD, login->password);
}

static const struct remote_ops oci_remote_ops = {
	.load = oci_load,
	.ask = oci_ask,
	.answered = oci_answered,
	.refused = oci_refused,
	.prepare = oci_prepare,
};

static bool consists_of(const char *text, const char *others)
{
	for (; *text; text++) {
		if (!islower((unsigned char)*text) && !isdigit((unsigned char)*text) &&
		    !strchr(others, *text))
			return false;
	}
	return true;
}

static int check_names(const struct oci_mirror *oci, struct complaint *complaint)
{
	size_t length = strlen(oci->repository);
	const char *colon = strchr(oci->digest, ':');
	size_t digits = colon ? strlen(colon + 1) : 0;

	if (!consists_of(oci->registry, "ABCDEFGHIJKLMNOPQRSTUVWXYZ.-:[]"))
		return complain(complaint, -EINVAL, "\"registry\" is '%s', no host[:port]",
				oci->registry);
	if (!consists_of(oci->repository, "._-/") || oci->repository[0] == '/' ||
	    oci->repository[length - 1] == '/' || strstr(oci->repository, "//") ||
	    strstr(oci->repository, ".."))
		return complain(complaint, -EINVAL, "\"repository\" is '%s', no name of one",
				oci->repository);
	if (!((!strncmp(oci->digest, "sha256:", 7) && digits == 64) ||
	      (!strncmp(oci->digest, "sha512:", 7) && digits == 128)) ||
	    strspn(colon + 1, "0123456789abcdef") != digits)
		return complain(complaint, -EINVAL,
				"\"digest\" is '%s', not \"sha256:\" and 64 hexadecimal digits",
				oci->digest);
	return 0;
}

static int check_url(const struct oci_mirror *oci, struct complaint *complaint)
{
	char *url = registry_url(oci);
	int err;

	if (!url)
		return complain(complaint, -ENOMEM, "no memory for a URL");
	err = url_check(url, "registry", complaint);
	if (!err && oci->insecure && !url_is_loopback(url)) {
		complaint_text(complaint, "\"insecure\" is for registries on loopback, not for %s",
			       oci->registry);
		complaint_hint(complaint, "\"ca_file\" names a certificate of your own to trust");
		err = -EINVAL;
	}
	free(url);
	return err;
}

static int oci_parse(struct mirror *mirror, json_t *keys, struct complaint *complaint)
{
	struct oci_mirror *oci = mirror->private;
	int err = remote_parse(&oci->remote, &oci_remote_ops, keys, complaint);

	oci->remote.reload_ms = OCI_RELOAD_MS;
	if (!err)
		err = keys_take_string(keys, "registry", true, &oci->registry, complaint);
	if (!err)
		err = keys_take_string(keys, "repository", true, &oci->repository, complaint);
	if (!err)
		err = keys_take_string(keys, "digest", true, &oci->digest, complaint);
	if (!err)
		err = remote_take_path(keys, "docker_config", &oci->docker_config, complaint);
	if (!err)
		err = keys_take_bool(keys, "insecure", &oci->insecure, complaint);
	if (!err)
		err = check_names(oci, complaint);
	if (!err)
		err = check_url(oci, complaint);
	if (!err)
		secret_guard_process();
	return err;
}

static void oci_close(struct mirror *mirror)
{
	struct oci_mirror *oci = mirror->private;

	remote_close(&oci->remote);
	free(oci->registry);
	free(oci->repository);
	free(oci->digest);
	free(oci->docker_config);
	free(oci->challenge);
}

static char *oci_url(const struct mirror *mirror)
{
	return registry_url(mirror->private);
}

static const struct object_ops oci_object_ops = { .url = oci_url };

static int oci_probe(struct mirror *mirror, uint32_t timeout_ms, struct mirror_probe *probe,
		     struct complaint *complaint)
{
	return object_probe(&oci_object_ops, mirror, timeout_ms, probe, complaint);
}

static void oci_fetch(struct fetch *fetch)
{
	object_fetch(&oci_object_ops, fetch);
}

static const char *oci_host(const struct mirror *mirror, char *text, size_t bytes)
{
	char *url = registry_url(mirror->private);

	url_host(url ? url : "", text, bytes);
	free(url);
	return text;
}

static const struct mirror_ops oci_ops = {
	.name = "oci",
	.private_bytes = sizeof(struct oci_mirror),
	.parse = oci_parse,
	.close = oci_close,
	.probe = oci_probe,
	.fetch = oci_fetch,
	.cancel = object_cancel,
	.host = oci_host,
};
MIRROR_KIND(oci_ops);
