/* SPDX-License-Identifier: MIT */
#include "lazy/mirror/answer.h"

#include <ctype.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>

enum { LINE_BYTES = 4096 /* a longer one is left alone, whatever it is */ };

void answer_reset(struct answer *answer)
{
	*answer = (struct answer){
		.range_total = ANSWER_UNKNOWN,
		.content_length = ANSWER_UNKNOWN,
	};
}

/* Digits only: strtoull() would take signs and spaces. Returns what follows, or NULL. */
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

/* "bytes 0-4095/8192", with "*" for a size that is not known (RFC 9110, 14.4). */
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
	*total = ANSWER_UNKNOWN;
	if (!strcmp(text + 1, "*"))
		return true;
	text = parse_number(text + 1, total);
	return text && !*text && *last < *total;
}

/* "bytes" and "*": of a range that cannot be had (416). */
static bool parse_no_range(const char *text, uint64_t *total)
{
	if (strncasecmp(text, "bytes */", 8) != 0)
		return false;
	text = parse_number(text + 8, total);
	return text && !*text;
}

static void take_range(struct answer *answer, const char *value)
{
	uint64_t first, last, total;

	if (answer->status == 416 && parse_no_range(value, &answer->range_total))
		return;
	if (!parse_range(value, &first, &last, &total) ||
	    (answer->has_range && (first != answer->range_first || last != answer->range_last ||
				   total != answer->range_total))) {
		answer->wrong_range = true;
		return;
	}
	answer->has_range = true;
	answer->range_first = first;
	answer->range_last = last;
	answer->range_total = total;
}

/* Left empty when it does not fit: half of it would be another one. */
static void take_text(char *text, size_t bytes, const char *value)
{
	size_t length = strlen(value);

	text[0] = 0;
	if (length < bytes)
		memcpy(text, value, length + 1);
}

static void take_challenge(struct answer *answer, const char *value)
{
	if (!strncasecmp(value, "bearer ", 7))
		take_text(answer->bearer, sizeof(answer->bearer), value + 7);
	else if (!strncasecmp(value, "basic", 5))
		answer->basic = true;
}

static void take_header(struct answer *answer, const char *name, const char *value)
{
	uint64_t number;

	if (!strcasecmp(name, "content-range")) {
		take_range(answer, value);
	} else if (!strcasecmp(name, "content-length")) {
		if (parse_number(value, &number))
			answer->content_length = number;
	} else if (!strcasecmp(name, "content-type")) {
		answer->multipart = !strncasecmp(value, "multipart/", 10);
	} else if (!strcasecmp(name, "content-encoding")) {
		if (strcasecmp(value, "identity") != 0)
			snprintf(answer->encoding, sizeof(answer->encoding), "%s",
				 *value ? value : "(none named)");
	} else if (!strcasecmp(name, "etag")) {
		take_text(answer->etag, sizeof(answer->etag), value);
	} else if (!strcasecmp(name, "last-modified")) {
		take_text(answer->last_modified, sizeof(answer->last_modified), value);
	} else if (!strcasecmp(name, "www-authenticate")) {
		take_challenge(answer, value);
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

void answer_line(struct answer *answer, const char *line, size_t length)
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
		/* Of the answer before (100, 103), nothing counts. */
		answer_reset(answer);
		answer->status = parse_status(text);
		return;
	}
	if (answer->complete)
		return;
	if (!length) {
		answer->complete = true;
		return;
	}
	value = strchr(text, ':');
	if (!value)
		return;
	*value++ = 0;
	while (isspace((unsigned char)*value))
		value++;
	take_header(answer, text, value);
}

static struct answer_verdict wrong(void)
{
	return (struct answer_verdict){ .err = -EPROTO, .failure = FETCH_WRONG };
}

static struct answer_verdict changed(void)
{
	return (struct answer_verdict){ .err = -ESTALE, .failure = FETCH_CHANGED };
}

struct answer_verdict answer_judge_status(unsigned status, struct complaint *complaint)
{
	complaint_text(complaint, "HTTP status %u", status);
	switch (status) {
	case 401:
	case 403:
	case 407:
		return (struct answer_verdict){ .err = -EACCES, .failure = FETCH_DENIED };
	case 404:
	case 410:
		return (struct answer_verdict){ .err = -ENOENT, .failure = FETCH_GONE };
	case 412:
		return changed();
	case 429:
		return (struct answer_verdict){ .err = -EBUSY, .failure = FETCH_BUSY };
	case 408:
	case 425:
		return (struct answer_verdict){ .err = -EIO, .failure = FETCH_TRANSIENT };
	default:
		if (status >= 500)
			return (struct answer_verdict){ .err = -EIO, .failure = FETCH_TRANSIENT };
		return wrong();
	}
}

static struct answer_verdict judge_range(const struct answer *answer,
					 const struct answer_wish *wish,
					 struct complaint *complaint)
{
	if (answer->range_first != wish->offset ||
	    answer->range_last != wish->offset + wish->length - 1) {
		complaint_text(complaint,
			       "answers with bytes %llu to %llu where %llu to %llu were asked for",
			       (unsigned long long)answer->range_first,
			       (unsigned long long)answer->range_last,
			       (unsigned long long)wish->offset,
			       (unsigned long long)wish->offset + wish->length - 1);
		return wrong();
	}
	if (wish->size != ANSWER_UNKNOWN && answer->range_total != ANSWER_UNKNOWN &&
	    answer->range_total != wish->size) {
		complaint_text(complaint, "the object has %llu bytes now, and had %llu",
			       (unsigned long long)answer->range_total,
			       (unsigned long long)wish->size);
		return changed();
	}
	if (answer->content_length != ANSWER_UNKNOWN && answer->content_length != wish->length) {
		complaint_text(complaint, "announces %llu bytes for a range of %u",
			       (unsigned long long)answer->content_length, wish->length);
		return wrong();
	}
	return (struct answer_verdict){};
}

struct answer_verdict answer_judge(const struct answer *answer, const struct answer_wish *wish,
				   struct complaint *complaint)
{
	if (answer->status == 200) {
		complaint_text(
			complaint,
			"answers with the whole object (HTTP status 200), not with the range");
		complaint_hint(complaint, "the server, or a proxy, does not know range requests");
		return wrong();
	}
	if (answer->status == 416) {
		complaint_text(complaint, "the object ends before byte %llu",
			       (unsigned long long)wish->offset + wish->length);
		return changed();
	}
	if (answer->status != 206)
		return answer_judge_status(answer->status, complaint);
	if (answer->multipart) {
		complaint_text(complaint, "answers with several parts (multipart/byteranges)");
		return wrong();
	}
	if (answer->encoding[0]) {
		complaint_text(complaint, "answers in the coding '%s', which was not asked for",
			       answer->encoding);
		return wrong();
	}
	if (answer->wrong_range || !answer->has_range) {
		complaint_text(complaint, "answers with %s Content-Range",
			       answer->wrong_range ? "a senseless" : "no");
		return wrong();
	}
	return judge_range(answer, wish, complaint);
}
