/* SPDX-License-Identifier: MIT */
/* The head of a response, and whether the body is the range that was asked for. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/error.h"
#include "content/source.h"

#define RESPONSE_UNKNOWN UINT64_MAX

struct response {
	unsigned status;
	bool complete; /* the empty line has been seen */
	bool has_range;
	bool wrong_range; /* a Content-Range is malformed, or several differ */
	uint64_t range_first, range_last;
	uint64_t range_total;	 /* RESPONSE_UNKNOWN: none was sent */
	uint64_t content_length; /* RESPONSE_UNKNOWN: none was sent */
	bool multipart;
	char encoding[32];	/* empty: none */
	char etag[200];		/* as sent, with its quotes; empty: none, or too long */
	char last_modified[64]; /* as sent */
	char challenges[2000];	/* all WWW-Authenticate that fit, joined by commas */
	uint32_t retry_after_s; /* 0: the server did not say; at most a day */
};

/* To be called before the first line. */
void response_reset(struct response *response);
/* Parses a line of the head, with its end. Lines after the empty one (trailers) are ignored. */
void response_line(struct response *response, const char *line, size_t length);

/* The range that was asked for. */
struct wanted_range {
	uint64_t offset; /* bytes */
	uint32_t length; /* bytes */
	uint64_t size;	 /* of the whole object; RESPONSE_UNKNOWN: any */
	bool begins;	 /* a range that goes on behind it is as good */
	/* And so is all of the object, of that size; if that is not known, of SOURCE_WHOLE_MAX_BYTES. */
	bool within_all;
};

/* Why a response is refused. The text of `error` follows "HOST: ". */
struct response_verdict {
	int err; /* 0: it is accepted */
	enum fetch_failure failure;
};

/* Whether it is all of an object that is accepted for a part: what lies before it comes first. */
bool response_is_all(const struct response *response, const struct wanted_range *wanted);
/* Refuses such a response. */
struct response_verdict response_refuse_all(struct error *error);
/* Whether it says that the object has no bytes, in one of the ways of servers. */
bool response_is_empty(const struct response *response);
/* Returns the object's size, or RESPONSE_UNKNOWN. Only of a response that is accepted. */
uint64_t response_size(const struct response *response);

struct response_verdict response_judge(const struct response *response,
				       const struct wanted_range *wanted, struct error *error);
/* Judges a status that is no success. */
struct response_verdict response_judge_status(unsigned status, struct error *error);
