/* SPDX-License-Identifier: MIT */
/* What a server said before the body, and whether the body is the range that was asked for. */
#ifndef LAZY_MIRROR_ANSWER_H
#define LAZY_MIRROR_ANSWER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "lazy/complaint.h"
#include "lazy/source.h"

#define ANSWER_UNKNOWN UINT64_MAX

struct answer {
	unsigned status;
	bool complete; /* the empty line has been seen */
	bool has_range;
	bool wrong_range; /* a Content-Range that makes no sense, or several that differ */
	uint64_t range_first, range_last;
	uint64_t range_total;	 /* ANSWER_UNKNOWN: not said */
	uint64_t content_length; /* ANSWER_UNKNOWN: not said */
	bool multipart;
	char encoding[32];	/* empty: none */
	char etag[200];		/* as sent, with its quotes; empty: none, or too long */
	char last_modified[64]; /* as sent */
	char bearer[1000];	/* a Bearer challenge of WWW-Authenticate */
	bool basic;		/* there is a Basic one */
};

/* Before the first line. */
void answer_reset(struct answer *answer);
/* One line of the head, with its end. What comes after the empty line (trailers) is left alone. */
void answer_line(struct answer *answer, const char *line, size_t length);

/* What was asked for. */
struct answer_wish {
	uint64_t offset; /* bytes */
	uint32_t length; /* bytes */
	uint64_t size;	 /* of the whole object; ANSWER_UNKNOWN: any */
};

/* Why an answer is not taken. `complaint` goes on after "HOST: ". */
struct answer_verdict {
	int err; /* 0: it is taken */
	enum fetch_failure failure;
};

struct answer_verdict answer_judge(const struct answer *answer, const struct answer_wish *wish,
				   struct complaint *complaint);
/* The same of a status by itself, where it is no success. */
struct answer_verdict answer_judge_status(unsigned status, struct complaint *complaint);

#endif
