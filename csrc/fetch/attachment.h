/* SPDX-License-Identifier: MIT */
/* What a part of a fetcher, such as a kind of mirror, keeps for all of that fetcher. */
#pragma once

#include <stddef.h>

struct fetcher;

/* The first member of what is kept. Only for the fetcher's thread. */
struct attachment {
	const struct attachment_kind *kind;
	struct attachment *next;
};

struct attachment_kind {
	size_t bytes; /* of all that is kept */
	/* Fills what is zero. Returns 0 or a negative errno, and has undone all then. */
	int (*open)(struct attachment *attachment, struct fetcher *fetcher);
	/*
	 * Called when no fetch is running any more. Closes all handles in the loop, which runs
	 * until they are closed, and frees the attachment.
	 */
	void (*close)(struct attachment *attachment);
};

/* What the fetcher has of this kind; made if there is none yet. Returns NULL without memory. */
void *attachment_of(struct fetcher *fetcher, const struct attachment_kind *kind);
/* The same, or NULL where there is none yet. */
void *attachment_if_open(const struct fetcher *fetcher, const struct attachment_kind *kind);
void attachments_close(struct fetcher *fetcher);
