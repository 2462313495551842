/* SPDX-License-Identifier: MIT */
#include "fetch/mirror/via.h"

#include <errno.h>
#include <fnmatch.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/fnv.h"
#include "base/keys.h"
#include "fetch/mirror/remote.h"

enum { CACHES_NAMED_MAX = 1024 };

struct rule {
	char *pattern; /* of fnmatch(), for a host, with or without its port */
	struct via *caches;
	unsigned count;
	bool plain;
};

static struct rules {
	struct rule *rules;
	unsigned count;
	json_t *texts;
} all[VIA_RULES];

static void free_caches(struct via *caches, unsigned count)
{
	for (unsigned i = 0; i < count; i++)
		free(caches[i].url);
	free(caches);
}

static int parse_cache(const char *url, char **cache, struct error *error)
{
	char host[REMOTE_TEXT_BYTES];
	const char *rest;
	int err;

	if (!url)
		return error_set(error, -EINVAL, "\"via\" must be a list of URLs");
	err = url_check(url, "via", error);
	if (err)
		return err;
	rest = strstr(url, "://") + 3;
	rest += strcspn(rest, "/?");
	if (*rest && strcmp(rest, "/") != 0) {
		error_set_hint(error, "the path comes from the source");
		return error_set(error, -EINVAL, "\"via\" has more than scheme, host and port: %s",
				 url_text(url, host));
	}
	if (asprintf(cache, "http%s://%s", url_is_https(url) ? "s" : "",
		     url_host(url, host, sizeof(host))) < 0) {
		*cache = NULL;
		return error_set(error, -ENOMEM, "no memory for a URL");
	}
	return 0;
}

static int parse_caches(const json_t *list, struct via **caches, unsigned *count,
			struct error *error)
{
	size_t wanted = json_array_size(list);
	int err = 0;

	if (!json_is_array(list) || !wanted || wanted > CACHES_NAMED_MAX)
		return error_set(error, -EINVAL, "\"via\" must be a list of 1 to %d URLs",
				 CACHES_NAMED_MAX);
	*caches = calloc(wanted, sizeof(**caches));
	if (!*caches)
		return error_set(error, -ENOMEM, "no memory for a URL");
	for (; !err && *count < wanted; *count += !err)
		err = parse_cache(json_string_value(json_array_get(list, *count)),
				  &(*caches)[*count].url, error);
	return err;
}

int remote_take_caches(struct remote *remote, json_t *keys, struct error *error)
{
	const json_t *list = json_object_get(keys, "via");
	int err = keys_take_bool(keys, "via_plain", &remote->via_plain, error);

	if (!err && list)
		err = parse_caches(list, &remote->via, &remote->via_count, error);
	json_object_del(keys, "via");
	return err;
}

void remote_free_caches(struct remote *remote)
{
	free_caches(remote->via, remote->via_count);
}

void via_rules_free(enum via_rules whose)
{
	struct rules *rules = &all[whose];

	for (unsigned i = 0; i < rules->count; i++) {
		free(rules->rules[i].pattern);
		free_caches(rules->rules[i].caches, rules->rules[i].count);
	}
	free(rules->rules);
	json_decref(rules->texts);
	*rules = (struct rules){};
}

static int parse_rule(const json_t *text, struct rule *rule, struct error *error)
{
	json_t *keys = json_is_object(text) ? json_copy((json_t *)text) : NULL;
	int err;

	if (!keys)
		return error_set(error, -EINVAL, "a rule of \"via\" must be an object");
	err = keys_take_string(keys, "for", true, &rule->pattern, error);
	if (!err)
		err = keys_take_bool(keys, "plain", &rule->plain, error);
	if (!err)
		err = parse_caches(json_object_get(keys, "caches"), &rule->caches, &rule->count,
				   error);
	json_object_del(keys, "caches");
	if (!err)
		err = keys_refuse_unknown(keys, error);
	json_decref(keys);
	return err;
}

int via_rules_set(enum via_rules whose, const json_t *texts, struct error *error)
{
	struct rules *rules = &all[whose];
	size_t count = json_array_size(texts);

	if (rules->texts && !json_equal(rules->texts, texts)) {
		error_set_hint(error, "they count for all sources: give all segments the same");
		return error_set(error, -EINVAL, "\"via\" has other rules than before");
	}
	via_rules_free(whose);
	if (!json_is_array(texts))
		return error_set(error, -EINVAL, "\"via\" must be a list of rules");
	rules->rules = calloc(count ?: 1, sizeof(*rules->rules));
	if (!rules->rules)
		return error_set(error, -ENOMEM, "no memory for rules");
	rules->texts = json_incref((json_t *)texts);
	while (rules->count < count) {
		struct rule *rule = &rules->rules[rules->count++];
		int err = parse_rule(json_array_get(texts, rules->count - 1), rule, error);

		if (err)
			return err;
	}
	return 0;
}

static const struct rule *find_rule(const struct rules *rules, const char *host, const char *name)
{
	for (unsigned i = 0; i < rules->count; i++) {
		if (!fnmatch(rules->rules[i].pattern, host, 0) ||
		    !fnmatch(rules->rules[i].pattern, name, 0))
			return &rules->rules[i];
	}
	return NULL;
}

static const struct rule *rule_for(const char *url)
{
	char host[REMOTE_TEXT_BYTES], name[REMOTE_TEXT_BYTES];

	/* A path of a file with the URL says nothing of its host. */
	snprintf(host, sizeof(host), "?");
	if (*url != '/')
		url_host(url, host, sizeof(host));
	snprintf(name, sizeof(name), "%s", host);
	if (strrchr(name, ':'))
		*strrchr(name, ':') = 0;
	return find_rule(&all[VIA_OF_DEVICE], host, name) ?:
							    find_rule(&all[VIA_OF_HOST], host, name);
}

static int copy_caches(struct remote *remote, const struct rule *rule, struct error *error)
{
	remote->via = calloc(rule->count, sizeof(*remote->via));
	for (unsigned i = 0; remote->via && i < rule->count; i++) {
		remote->via[i].url = strdup(rule->caches[i].url);
		if (!remote->via[i].url)
			return error_set(error, -ENOMEM, "no memory for a URL");
		remote->via_count++;
	}
	return remote->via ? 0 : error_set(error, -ENOMEM, "no memory for a URL");
}

static int compare(const void *one, const void *other)
{
	const struct via *a = one, *b = other;

	return (a->weight < b->weight) - (a->weight > b->weight);
}

static bool is_allowed(const struct via *cache, bool secret, bool plain)
{
	return !secret || plain || url_is_https(cache->url) || url_is_loopback(cache->url);
}

static void drop_refused(struct remote *remote, bool secret)
{
	unsigned kept = 0;

	for (unsigned i = 0; i < remote->via_count; i++) {
		if (is_allowed(&remote->via[i], secret, remote->via_plain))
			remote->via[kept++] = remote->via[i];
		else
			free(remote->via[i].url);
	}
	remote->via_count = kept;
}

int remote_settle_caches(struct remote *remote, const char *url, bool secret, struct error *error)
{
	const struct rule *rule = remote->via_count ? NULL : rule_for(url);

	for (unsigned i = 0; i < remote->via_count; i++) {
		if (is_allowed(&remote->via[i], secret, remote->via_plain))
			continue;
		error_set_hint(error, "write https://, or allow it: \"via_plain\": true");
		return error_set(error, -EINVAL, "credentials would go to the cache %s without TLS",
				 remote->via[i].url);
	}
	if (rule) {
		int err = copy_caches(remote, rule, error);

		if (err)
			return err;
		remote->via_plain = rule->plain;
		drop_refused(remote, secret);
	}
	/* Without the query: a signature is another one on each host. */
	for (unsigned i = 0; i < remote->via_count; i++) {
		struct via *cache = &remote->via[i];
		uint64_t hash = fnv_add(FNV_BEGIN, cache->url, strlen(cache->url));

		cache->weight = fnv_add(hash, url, strcspn(url, "?"));
	}
	if (remote->via_count)
		qsort(remote->via, remote->via_count, sizeof(*remote->via), compare);
	return 0;
}

const char *remote_cache(const struct mirror *mirror, unsigned number, uint64_t *weight)
{
	const struct remote *remote = mirror->private;

	if (number >= remote->via_count)
		return NULL;
	*weight = remote->via[number].weight;
	return remote->via[number].url;
}
