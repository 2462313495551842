/* SPDX-License-Identifier: MIT */
#include "fetch/mirror/http1_request.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "content/identity.h"

/*
 * What a request has besides what its carriage names. NB: whether it can be written does not depend on
 * its condition, which exchange_can_send() does not know.
 */
enum { FIXED_BYTES = 512 + IDENTITY_BYTES };

/* What the environment says, which does not change while a server runs. */
static bool proxy_in_environment, only_libcurl;

static bool is_set(const char *name)
{
	const char *value = getenv(name);

	return value && *value;
}

static void read_environment(void)
{
	const char *carrier = getenv("BTRFS_UBLK_HTTP");

	/* NB: libcurl takes no HTTP_PROXY, which a CGI script would get from its client. */
	proxy_in_environment = is_set("http_proxy") || is_set("all_proxy") || is_set("ALL_PROXY");
	only_libcurl = carrier && !strcmp(carrier, "libcurl");
}

static bool has_proxy(const struct remote *remote)
{
	return remote->proxy ? *remote->proxy : proxy_in_environment;
}

static bool split(const char *url, struct http1_target *target)
{
	static const char names[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
				    "0123456789.-_";
	size_t length;

	if (strncasecmp(url, "http://", 7) != 0)
		return false;
	target->host = url + 7;
	if (*target->host == '[') {
		length = 1 + strspn(target->host + 1, "0123456789abcdefABCDEF:.");
		if (target->host[length++] != ']')
			return false;
	} else {
		length = strspn(target->host, names);
	}
	if (target->host[length] == ':')
		length += 1 + strspn(target->host + length + 1, "0123456789");
	target->host_length = length;
	target->path = target->host + length;
	/* libcurl leaves the default port out of "Host". */
	if (length > 3 && !memcmp(target->path - 3, ":80", 3))
		target->host_length -= 3;
	if (!target->host_length || *target->path != '/')
		return false;
	for (const char *at = target->path; *at; at++) {
		if (*at <= ' ' || *at > '~' || *at == '#')
			return false;
	}
	return true;
}

static bool is_text(const char *text)
{
	for (; *text; text++) {
		if (((unsigned char)*text < ' ' && *text != '\t') || *text == 127)
			return false;
	}
	return true;
}

/* Whether libcurl would send it unchanged beside the headers that each request has. */
static bool is_additional(const char *header)
{
	static const char *const reserved[] = {
		"host",
		"range",
		"referer",
		"user-agent",
		"accept",
		"accept-encoding",
		"if-range",
		"content-length",
		"connection",
		"expect",
		"te",
		"keep-alive",
		"transfer-encoding",
		"upgrade",
		"trailer",
	};
	size_t name = strspn(header, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
				     "0123456789-_");

	if (!name || header[name] != ':' || !is_text(header) ||
	    !header[name + 1 + strspn(header + name + 1, " \t")])
		return false;
	for (size_t i = 0; i < sizeof(reserved) / sizeof(*reserved); i++) {
		if (strlen(reserved[i]) == name && !strncasecmp(header, reserved[i], name))
			return false;
	}
	return true;
}

/* Whether libcurl would send the same, and there is room for it. */
static bool is_writable(const struct carriage *carriage)
{
	const struct curl_slist *header = carriage->home ? carriage->login->headers : NULL;
	size_t bytes = FIXED_BYTES + strlen(carriage->url) + strlen(carriage->origin ?: "") +
		       strlen(carriage->referer ?: "");

	for (; header; header = header->next) {
		if (!is_additional(header->data))
			return false;
		bytes += strlen(header->data) + 2;
	}
	return bytes < HTTP1_REQUEST_MAX_BYTES && is_text(carriage->if_range ?: "");
}

bool http1_request_is_plain(const struct carriage *carriage, struct http1_target *target)
{
	static pthread_once_t once = PTHREAD_ONCE_INIT;
	const struct login *login = carriage->login;

	pthread_once(&once, read_environment);
	if (only_libcurl || !carriage->length || carriage->form || carriage->accept ||
	    (!carriage->origin && has_proxy(carriage->remote)))
		return false;
	if (carriage->home && ((login->certificate.text && !carriage->origin) ||
			       (login->user && carriage->remote->ops->prepare)))
		return false;
	return split(carriage->url, target) && is_writable(carriage);
}

size_t http1_request_write(const struct carriage *carriage, const struct http1_target *target,
			   char text[static HTTP1_REQUEST_MAX_BYTES])
{
	const size_t room = HTTP1_REQUEST_MAX_BYTES;
	const struct curl_slist *header = carriage->home ? carriage->login->headers : NULL;
	const char *if_range = carriage->if_range;
	const char *host = carriage->origin ?: target->host;
	size_t host_length = carriage->origin ? strlen(carriage->origin) : target->host_length;
	size_t used;

	used = (size_t)snprintf(
		text, room,
		"GET %s HTTP/1.1\r\nHost: %.*s\r\nRange: bytes=%llu-%llu\r\n"
		"User-Agent: " TRANSFER_USER_AGENT "\r\nAccept: */*\r\n"
		"Accept-Encoding: identity\r\n%s%s%s",
		target->path, (int)host_length, host, (unsigned long long)carriage->offset,
		(unsigned long long)carriage->offset + carriage->length - 1,
		if_range ? "If-Range: " : "", if_range ?: "", if_range ? "\r\n" : "");
	if (carriage->referer && used < room)
		used += (size_t)snprintf(text + used, room - used, "Referer: %s\r\n",
					 carriage->referer);
	for (; header && used < room; header = header->next)
		used += (size_t)snprintf(text + used, room - used, "%s\r\n", header->data);
	if (used + 2 >= room)
		return 0;
	memcpy(text + used, "\r\n", 2);
	return used + 2;
}
