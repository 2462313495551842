/* SPDX-License-Identifier: MIT */
/*
 * A blob of a container registry: `"registry"` (a host, and perhaps a port), `"repository"`,
 * `"digest"` ("sha256:..."), `"docker_config"` (a config.json; else the usual files), `"insecure"`
 * (http, on loopback only). remote.h has certificates and proxy. Where the host mirrors another
 * registry, `"namespace"` names that one, and `"path"` is where its interface begins, if not at "/v2".
 *
 * The protocol is OCI distribution specification 1.1; its tokens are the "token authentication" of
 * the CNCF's distribution project.
 *
 * NB: the digest is that of the whole blob. It names the blob, so there is no identity to pin; but
 * it cannot verify a part of it, which takes digests per unit.
 */
#include <ctype.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "base/json_text.h"
#include "base/keys.h"
#include "fetch/inquiry.h"
#include "fetch/mirror/challenge.h"
#include "fetch/mirror/docker.h"
#include "fetch/mirror/exchange.h"
#include "fetch/mirror/object.h"

enum {
	/* Helpers take long, so do not run them often. */
	OCI_RELOAD_MS = 300000,
	/* RFC 6749 has no default; this one is the token protocol's. */
	TOKEN_DEFAULT_S = 60,
	TOKEN_MARGIN_S = 30,
	TOKEN_MAX_S = 86400,
	TOKEN_JITTER = 10, /* of that part of its life, it is renewed sooner, by chance */
};

#define HOST_LETTERS "ABCDEFGHIJKLMNOPQRSTUVWXYZ.-:[]"

static const char hub[] = "docker.io";
static const char hub_host[] = "registry-1.docker.io";

struct oci_mirror {
	struct remote remote;
	char *registry, *repository, *digest, *docker_config, *namespace, *path;
	bool insecure;

	/* What the registry asks for; under remote.lock. */
	char *challenge; /* that wants a token */
	bool basic;
};

/* `what` is "blobs", or "manifests", which have tags as well as digests. */
static char *url_of(const struct oci_mirror *oci, const char *what, const char *name)
{
	const char *host = strcmp(oci->registry, hub) ? oci->registry : hub_host;
	char *url = NULL;

	if (asprintf(&url, "http%s://%s%s/%s/%s/%s%s%s", oci->insecure ? "" : "s", host,
		     oci->path ?: "/v2", oci->repository, what, name, oci->namespace ? "?ns=" : "",
		     oci->namespace ?: "") < 0)
		return NULL;
	return url;
}

static char *registry_url(const struct oci_mirror *oci)
{
	return url_of(oci, "blobs", oci->digest);
}

/*
 * Fills in the host's token for the repository and these credentials, if it has one. The token server
 * may know us by the client certificate, too, which commands have none of.
 */
static int share_token(struct remote *remote, const struct docker_login *found, struct login *login,
		       struct error *error)
{
	const struct oci_mirror *oci = (const struct oci_mirror *)remote;
	const char *const texts[] = { oci->registry,
				      oci->insecure ? "http" : "https",
				      "pull",
				      oci->repository,
				      found->user ?: "",
				      found->password ?: "",
				      found->identity_token ?: "",
				      login->certificate.text, /* or NULL */
				      NULL };
	char key[TOKEN_KEY_BYTES], *text = NULL;
	uint64_t refused;
	bool wanted;
	int err = 0;

	token_key(texts, key);
	pthread_mutex_lock(&remote->lock);
	memcpy(remote->token_key, key, sizeof(key));
	wanted = remote->wants_token;
	refused = remote->token_refused;
	pthread_mutex_unlock(&remote->lock);
	switch (token_find(key, wanted, refused, &text, &login->until_ns)) {
	case TOKEN_THERE:
		err = login_add_header(login, TOKEN_HEADER "%s", text);
		secret_free(text);
		break;
	case TOKEN_FAILED:
		err = error_set(error, -EAGAIN,
				"the token server of %s is asked once a second, and has failed: %s",
				oci->registry, text ?: "it is not known why");
		secret_free(text);
		return err;
	case TOKEN_REFUSED:
		err = error_set(error, -EKEYREJECTED, "%s", text ?: "the login is refused");
		secret_free(text);
		return err;
	case TOKEN_ASK:
	case TOKEN_NONE:
		break;
	}
	return err ? error_set(error, err, "no memory for a token") : 0;
}

static int oci_load(struct remote *remote, struct login *login, struct error *error)
{
	const struct oci_mirror *oci = (const struct oci_mirror *)remote;
	struct docker_login found = {};
	int err = docker_login_find(oci->docker_config, oci->registry, oci->repository,
				    &remote->helper_seen, &found, error);

	if (err)
		return err;
	if (found.registry_token)
		err = login_add_header(login, TOKEN_HEADER "%s", found.registry_token);
	else
		err = share_token(remote, &found, login, error);
	login->user = found.user;
	login->password = found.identity_token ? found.identity_token : found.password;
	found.user = found.password = found.identity_token = NULL;
	docker_login_clear(&found);
	return err;
}

/* Fills in what the registry has asked for; "bearer" says whether that was a token. */
static int take_challenge(struct oci_mirror *oci, struct challenge *challenge)
{
	char *url = registry_url(oci), *text;
	int err = -ENOMEM;

	pthread_mutex_lock(&oci->remote.lock);
	text = strdup(oci->challenge ?: "");
	pthread_mutex_unlock(&oci->remote.lock);
	if (url && text)
		err = challenge_parse(text, url, challenge);
	free(url);
	free(text);
	return err;
}

static int check_realm(const struct oci_mirror *oci, const char *realm, struct error *error)
{
	char text[REMOTE_TEXT_BYTES];
	struct error unused = {};

	if (!realm || !*realm)
		return error_set(error, -EPROTO, "%s asks for a token in a way that is not valid",
				 oci->registry);
	if (url_check(realm, "realm", &unused))
		return error_set(error, -EPROTO, "%s names no URL to get a token from",
				 oci->registry);
	/* The password is sent there. */
	if (!url_is_https(realm) && !(oci->insecure && url_is_loopback(realm)))
		return error_set(error, -EPROTO, "%s wants its token got without TLS, from %s",
				 oci->registry, url_text(realm, text));
	return 0;
}

static int oci_ask(struct remote *remote, struct login *login, struct exchange *exchange,
		   struct error *error)
{
	struct oci_mirror *oci = (struct oci_mirror *)remote;
	struct challenge challenge = {};
	int err;

	pthread_mutex_lock(&remote->lock);
	login->send_user = oci->basic && login->user;
	pthread_mutex_unlock(&remote->lock);
	if (login->headers || login->send_user)
		return 0;
	err = take_challenge(oci, &challenge);
	if (err)
		return error_set(error, err, "no memory for a request");
	if (!challenge.bearer)
		return 0; /* the registry has not asked for a token */
	err = check_realm(oci, challenge.realm, error);
	if (!err &&
	    challenge_request(&challenge, oci->repository, login->user ? NULL : login->password,
			      &exchange->url, &exchange->form))
		err = error_set(error, -ENOMEM, "no memory for a request");
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

static uint64_t random_below(uint64_t end)
{
	uint64_t random = 0;

	if (getrandom(&random, sizeof(random), GRND_NONBLOCK) < 0)
		random = clock_now_ns();
	return end ? random % end : 0;
}

static int oci_answered(struct remote *remote, struct login *login, const char *text,
			struct error *error)
{
	const struct oci_mirror *oci = (const struct oci_mirror *)remote;
	json_t *response = text ? json_text_parse(text, strlen(text), 0, NULL) : NULL;
	const char *token = json_string_value(json_object_get(response, "token"));
	json_int_t life_s = json_integer_value(json_object_get(response, "expires_in"));
	uint64_t life_ns;
	int err;

	if (!token)
		token = json_string_value(json_object_get(response, "access_token"));
	if (!token || !*token || strpbrk(token, "\r\n")) {
		json_decref(response);
		return error_set(error, -EPROTO, "the token server of %s answers without a token",
				 oci->registry);
	}
	if (life_s <= 0)
		life_s = TOKEN_DEFAULT_S;
	if (life_s > TOKEN_MAX_S)
		life_s = TOKEN_MAX_S;
	/* Renew it while it is good, but not at once again. */
	life_ns = (uint64_t)life_s * NS_PER_S;
	life_ns -= life_s > 4 * TOKEN_MARGIN_S ? TOKEN_MARGIN_S * NS_PER_S : life_ns / 4;
	/* Hosts that have begun together are not to renew theirs together. */
	login->until_ns = clock_now_ns() + life_ns - random_below(life_ns / TOKEN_JITTER);
	login->send_user = false;
	err = login_add_header(login, TOKEN_HEADER "%s", token);
	json_decref(response);
	return err ? error_set(error, err, "no memory for a token") : 0;
}

static bool oci_refused(struct remote *remote, const struct response *response)
{
	struct oci_mirror *oci = (struct oci_mirror *)remote;
	struct challenge challenge;
	bool wants_token, known;

	if (response->status != 401 || challenge_parse(response->challenges, "", &challenge))
		return false;
	wants_token = challenge_wants_token(&challenge);
	pthread_mutex_lock(&remote->lock);
	if (wants_token) {
		free(oci->challenge);
		oci->challenge = strdup(response->challenges);
	}
	oci->basic = challenge.basic && !wants_token;
	remote->wants_token = wants_token;
	known = oci->challenge || oci->basic;
	pthread_mutex_unlock(&remote->lock);
	challenge_clear(&challenge);
	return known;
}

static void oci_prepare(const struct remote *remote, const struct login *login, CURL *easy)
{
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

static bool is_digest(const char *text)
{
	const char *colon = strchr(text, ':');
	size_t digits = colon ? strlen(colon + 1) : 0;

	return ((!strncmp(text, "sha256:", 7) && digits == 64) ||
		(!strncmp(text, "sha512:", 7) && digits == 128)) &&
	       strspn(colon + 1, "0123456789abcdef") == digits;
}

static bool is_tag(const char *text)
{
	size_t length = strlen(text);

	return length && length <= 128 && *text != '.' && *text != '-' &&
	       strspn(text, "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_.-") ==
		       length;
}

static bool is_path(const char *text)
{
	size_t length = strlen(text);

	return length > 1 && text[0] == '/' && text[length - 1] != '/' && !strstr(text, "//") &&
	       !strstr(text, "..") && consists_of(text, "ABCDEFGHIJKLMNOPQRSTUVWXYZ._-/");
}

static int check_names(const struct oci_mirror *oci, struct error *error)
{
	size_t length = strlen(oci->repository);

	if (!consists_of(oci->registry, HOST_LETTERS))
		return error_set(error, -EINVAL, "\"registry\" is '%s', no host[:port]",
				 oci->registry);
	if (!consists_of(oci->repository, "._-/") || oci->repository[0] == '/' ||
	    oci->repository[length - 1] == '/' || strstr(oci->repository, "//") ||
	    strstr(oci->repository, ".."))
		return error_set(error, -EINVAL, "\"repository\" is '%s', which is no valid name",
				 oci->repository);
	if (oci->namespace && !consists_of(oci->namespace, HOST_LETTERS))
		return error_set(error, -EINVAL, "\"namespace\" is '%s', no host[:port]",
				 oci->namespace);
	if (oci->path && !is_path(oci->path))
		return error_set(error, -EINVAL,
				 "\"path\" is '%s', not \"/\" and names without a \"/\" at the end",
				 oci->path);
	if (!is_digest(oci->digest))
		return error_set(error, -EINVAL,
				 "\"digest\" is '%s', not \"sha256:\" and 64 hexadecimal digits",
				 oci->digest);
	return 0;
}

static int check_url(const struct oci_mirror *oci, struct error *error)
{
	char *url = registry_url(oci);
	int err;

	if (!url)
		return error_set(error, -ENOMEM, "no memory for a URL");
	err = url_check(url, "registry", error);
	if (!err && oci->insecure && !url_is_loopback(url)) {
		error_set_text(error, "\"insecure\" is for registries on loopback, not for %s",
			       oci->registry);
		error_set_hint(error, "\"ca_file\" names a certificate of your own to trust");
		err = -EINVAL;
	}
	free(url);
	return err;
}

static int settle_caches(struct oci_mirror *oci, struct error *error)
{
	char *url = registry_url(oci);
	int err = url ? remote_settle_caches(&oci->remote, url, true, error) :
			error_set(error, -ENOMEM, "no memory for a URL");

	free(url);
	return err;
}

static int oci_parse(struct mirror *mirror, json_t *keys, struct error *error)
{
	struct oci_mirror *oci = mirror->private;
	int err = remote_parse(&oci->remote, &oci_remote_ops, keys, error);

	oci->remote.reload_ms = OCI_RELOAD_MS;
	if (!err)
		err = keys_take_string(keys, "registry", true, &oci->registry, error);
	if (!err)
		err = keys_take_string(keys, "repository", true, &oci->repository, error);
	if (!err)
		err = keys_take_string(keys, "digest", true, &oci->digest, error);
	if (!err)
		err = remote_take_path(keys, "docker_config", &oci->docker_config, error);
	if (!err)
		err = keys_take_bool(keys, "insecure", &oci->insecure, error);
	if (!err)
		err = keys_take_string(keys, "namespace", false, &oci->namespace, error);
	if (!err)
		err = keys_take_string(keys, "path", false, &oci->path, error);
	if (!err)
		err = check_names(oci, error);
	if (!err)
		err = check_url(oci, error);
	if (!err)
		err = settle_caches(oci, error);
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
	free(oci->namespace);
	free(oci->path);
}

static char *oci_url(const struct mirror *mirror)
{
	return registry_url(mirror->private);
}

/* The manifest of a tag or digest: what an image consists of, or the images for each platform. */
static char *oci_document_url(const struct mirror *mirror, const char *name)
{
	return url_of(mirror->private, "manifests", name);
}

static bool is_document(const char *name)
{
	return is_tag(name) || is_digest(name);
}

static const struct object_ops oci_object_ops = {
	.is_document = is_document,
	.url = oci_url,
	.document_url = oci_document_url,
	.document_kind = "oci manifest",
	.document_types = "application/vnd.oci.image.index.v1+json, "
			  "application/vnd.oci.image.manifest.v1+json, "
			  "application/vnd.docker.distribution.manifest.list.v2+json, "
			  "application/vnd.docker.distribution.manifest.v2+json",
};

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
	.object = &oci_object_ops,
	.has_names = true,
	.host = oci_host,
	.immutable = true,
	OBJECT_MIRROR_OPS,
};
MIRROR_KIND(oci_ops);
