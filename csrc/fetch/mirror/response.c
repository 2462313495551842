/* SPDX-License-Identifier: MIT */
#include "fetch/mirror/response.h"

#include <ctype.h>
#include <curl/curl.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>
#include <time.h>

enum {
	LINE_BYTES = 4096, /* longer lines are ignored */
	RETRY_AFTER_MAX_S = 86400,
};

void response_reset(struct response *response)
{
	*response = (struct response){
		.range_total = RESPONSE_UNKNOWN,
		.content_length = RESPONSE_UNKNOWN,
	};
}

/* Accepts digits only: strtoull() would accept signs and spaces. Returns what follows, or NULL. */
static const char *parse_number(const char *text, uint64_t *value)
{
	uint64_t number = 0;

	if (!isdigit((unsigned char)*text))
		return NULL;
	for (; isdigit((unsigned char)*text); text++) {
		if (__builtin_mul_overflow(number, 10, &number) ||
		    __builtin_add_overflow(number, *text - '0', &number))
			return NULL;
	}
	*value = number;
	return text;
}

/* Parses "bytes 0-4095/8192", with "*" for an unknown size (RFC 9110, 14.4). */
static bool parse_range(const char *text, uint64_t *first, uint64_t *last, uint64_t *total)
{
	if (strncasecmp(text, "bytes ", 6) != 0)
		return false;
	text = parse_number(text + 6, first);
	if (!text || *text != '-')
		return false;
	text = parse_number(text + 1, last);
	if (!text || *text != '/' || *first > *last)
		return false;
	*total = RESPONSE_UNKNOWN;
	if (!strcmp(text + 1, "*"))
		return true;
	text = parse_number(text + 1, total);
	return text && !*text && *last < *total;
}

/* Parses the "*" after "bytes", for a range that does not exist (416). */
static bool parse_no_range(const char *text, uint64_t *total)
{
	if (strncasecmp(text, "bytes */", 8) != 0)
		return false;
	text = parse_number(text + 8, total);
	return text && !*text;
}

static bool is_of_nothing(const char *text)
{
	const char *total = strchr(text, '/');

	return !strncasecmp(text, "bytes ", 6) && total && !strcmp(total, "/0");
}

static void take_range(struct response *response, const char *value)
{
	uint64_t first, last, total;

	if (response->status == 416 && parse_no_range(value, &response->range_total))
		return;
	/* "bytes 0--1/0" or "bytes 0-0/0", instead of 416. */
	if (response->status == 206 && is_of_nothing(value))
		response->range_total = 0;
	if (!parse_range(value, &first, &last, &total) ||
	    (response->has_range &&
	     (first != response->range_first || last != response->range_last ||
	      total != response->range_total))) {
		response->wrong_range = true;
		return;
	}
	response->has_range = true;
	response->range_first = first;
	response->range_last = last;
	response->range_total = total;
}

/* Leaves it empty when it does not fit: a part of it would be another text. */
static void take_text(char *text, size_t bytes, const char *value)
{
	size_t length = strlen(value);

	text[0] = 0;
	if (length < bytes)
		memcpy(text, value, length + 1);
}

static void take_challenge(struct response *response, const char *value)
{
	size_t there = strlen(response->challenges);

	if (there + strlen(value) + 3 <= sizeof(response->challenges))
		sprintf(response->challenges + there, "%s%s", there ? ", " : "", value);
}

/* Takes seconds, or a date. */
static void take_retry_after(struct response *response, const char *value)
{
	const char *end;
	uint64_t wait_s = 0;
	time_t at_s;

	end = parse_number(value, &wait_s);
	if (!end || *end) {
		at_s = curl_getdate(value, NULL);
		wait_s = at_s > time(NULL) ? (uint64_t)(at_s - time(NULL)) : 0;
	}
	response->retry_after_s = wait_s < RETRY_AFTER_MAX_S ? (uint32_t)wait_s : RETRY_AFTER_MAX_S;
}

static void take_header(struct response *response, const char *name, const char *value)
{
	uint64_t number;

	if (!strcasecmp(name, "content-range")) {
		take_range(response, value);
	} else if (!strcasecmp(name, "content-length")) {
		if (parse_number(value, &number))
			response->content_length = number;
	} else if (!strcasecmp(name, "content-type")) {
		response->multipart = !strncasecmp(value, "multipart/", 10);
	} else if (!strcasecmp(name, "content-encoding")) {
		if (strcasecmp(value, "identity") != 0)
			snprintf(response->encoding, sizeof(response->encoding), "%s",
				 *value ? value : "(none named)");
	} else if (!strcasecmp(name, "etag")) {
		take_text(response->etag, sizeof(response->etag), value);
	} else if (!strcasecmp(name, "last-modified")) {
		take_text(response->last_modified, sizeof(response->last_modified), value);
	} else if (!strcasecmp(name, "www-authenticate")) {
		take_challenge(response, value);
	} else if (!strcasecmp(name, "retry-after")) {
		take_retry_after(response, value);
	}
}

static unsigned parse_status(const char *line)
{
	const char *space = strchr(line, ' ');
	uint64_t status = 0;

	if (!space || !parse_number(space + 1, &status) || status > 999)
		return 0;
	return (unsigned)status;
}

void response_line(struct response *response, const char *line, size_t length)
{
	char text[LINE_BYTES];
	char *value;

	while (length && isspace((unsigned char)line[length - 1]))
		length--;
	if (length >= sizeof(text))
		return;
	memcpy(text, line, length);
	text[length] = 0;
	if (!strncmp(text, "HTTP/", 5)) {
		/* Forget informational responses before it (100, 103). */
		response_reset(response);
		response->status = parse_status(text);
		return;
	}
	if (response->complete)
		return;
	if (!length) {
		response->complete = true;
		/* rclone's S3 server says that of a range: only the header tells. */
		if (response->status == 200 && response->has_range)
			response->status = 206;
		return;
	}
	value = strchr(text, ':');
	if (!value)
		return;
	*value++ = 0;
	while (isspace((unsigned char)*value))
		value++;
	take_header(response, text, value);
}

static struct response_verdict wrong(void)
{
	return (struct response_verdict){ .err = -EPROTO, .failure = FETCH_WRONG };
}

static struct response_verdict changed(void)
{
	return (struct response_verdict){ .err = -ESTALE, .failure = FETCH_CHANGED };
}

struct response_verdict response_judge_status(unsigned status, struct error *error)
{
	error_set_text(error, "HTTP status %u", status);
	switch (status) {
	case 401:
	case 403:
	case 407:
		return (struct response_verdict){ .err = -EACCES, .failure = FETCH_DENIED };
	case 404:
	case 410:
		return (struct response_verdict){ .err = -ENOENT, .failure = FETCH_GONE };
	case 412:
		return changed();
	case 429:
		return (struct response_verdict){ .err = -EBUSY, .failure = FETCH_BUSY };
	case 408:
	case 425:
		return (struct response_verdict){ .err = -EIO, .failure = FETCH_TRANSIENT };
	default:
		if (status >= 500)
			return (struct response_verdict){ .err = -EIO, .failure = FETCH_TRANSIENT };
		return wrong();
	}
}

static bool has_another_size(const struct response *response, const struct wanted_range *wanted)
{
	return wanted->size != RESPONSE_UNKNOWN && response->range_total != RESPONSE_UNKNOWN &&
	       response->range_total != wanted->size;
}

static struct response_verdict another_size(const struct response *response,
					    const struct wanted_range *wanted, struct error *error)
{
	error_set_text(error, "the object has %llu bytes now, and had %llu",
		       (unsigned long long)response->range_total, (unsigned long long)wanted->size);
	return changed();
}

static struct response_verdict judge_range(const struct response *response,
					   const struct wanted_range *wanted, struct error *error)
{
	uint64_t last = wanted->offset + wanted->length - 1;
	uint64_t length = response->range_last - response->range_first + 1;

	if (response->range_first != wanted->offset ||
	    (wanted->begins ? response->range_last < last : response->range_last != last)) {
		error_set_text(error,
			       "answers with bytes %llu to %llu where %llu to %llu were asked for",
			       (unsigned long long)response->range_first,
			       (unsigned long long)response->range_last,
			       (unsigned long long)wanted->offset, (unsigned long long)last);
		return wrong();
	}
	if (has_another_size(response, wanted))
		return another_size(response, wanted, error);
	if (response->content_length != RESPONSE_UNKNOWN && response->content_length != length) {
		error_set_text(error, "announces %llu bytes for a range of %llu",
			       (unsigned long long)response->content_length,
			       (unsigned long long)length);
		return wrong();
	}
	return (struct response_verdict){};
}

bool response_is_empty(const struct response *response)
{
	if (response->status == 200)
		return !response->content_length && !response->encoding[0];
	return (response->status == 206 || response->status == 416) && !response->range_total;
}

uint64_t response_size(const struct response *response)
{
	return response->status == 200 ? response->content_length : response->range_total;
}

/* Some servers answer so to a range that is all there is, as RFC 9110 allows (14.2). */
static bool is_whole(const struct response *response, const struct wanted_range *wanted)
{
	return response->status == 200 && !wanted->offset &&
	       response->content_length == wanted->length &&
	       (wanted->size == RESPONSE_UNKNOWN || wanted->size == wanted->length);
}

bool response_is_all(const struct response *response, const struct wanted_range *wanted)
{
	if (response->status != 200 || !wanted->within_all || response->encoding[0])
		return false;
	if (wanted->size == RESPONSE_UNKNOWN)
		return response->content_length <= SOURCE_WHOLE_MAX_BYTES;
	return response->content_length == wanted->size ||
	       response->content_length == RESPONSE_UNKNOWN;
}

struct response_verdict response_refuse_all(struct error *error)
{
	error_set_text(error,
		       "answers with the whole object (HTTP status 200), not with the range");
	return wrong();
}

struct response_verdict response_judge(const struct response *response,
				       const struct wanted_range *wanted, struct error *error)
{
	if (response_is_empty(response)) {
		error_set_text(error, "the object is empty (0 bytes)");
		/* NB: a proxy may answer so instead of the server. */
		return response->status == 200 ? wrong() : changed();
	}
	if ((response->status == 200 || response->status == 206) && response->encoding[0]) {
		error_set_text(error, "answers in the coding '%s', which was not asked for",
			       response->encoding);
		return wrong();
	}
	if (is_whole(response, wanted) || response_is_all(response, wanted))
		return (struct response_verdict){};
	if (response->status == 200)
		return response_refuse_all(error);
	if (response->status == 416 && has_another_size(response, wanted))
		return another_size(response, wanted, error);
	if (response->status == 416) {
		error_set_text(error, "the object ends before byte %llu",
			       (unsigned long long)wanted->offset + wanted->length);
		return changed();
	}
	if (response->status != 206)
		return response_judge_status(response->status, error);
	if (response->multipart) {
		error_set_text(error, "answers with several parts (multipart/byteranges)");
		return wrong();
	}
	if (response->wrong_range || !response->has_range) {
		error_set_text(error, "answers with %s Content-Range",
			       response->wrong_range ? "an invalid" : "no");
		return wrong();
	}
	return judge_range(response, wanted, error);
}
