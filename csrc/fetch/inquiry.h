/* SPDX-License-Identifier: MIT */
/*
 * Questions to a mirror that are not about its bytes: how large the object is and which identity it
 * has, or what a name such as a tag names now. They are asked before anything is mapped.
 */
#pragma once

#include <stdint.h>

#include "base/error.h"
#include "content/source.h"

struct asker;
struct fetcher;

enum { INQUIRY_TEXT_MAX_BYTES = 256 << 10 /* of a document */ };

struct inquiry {
	/* Set by the caller of inquire(), zeroed otherwise. */
	struct fetcher *fetcher;
	struct mirror *mirror;
	const char *name;     /* of a document; NULL: the size and the identity are wanted */
	uint64_t deadline_ns; /* CLOCK_MONOTONIC; the kind keeps it */
	/*
	 * Called once on the fetcher's thread, perhaps before ops->inquire() returns. NB: the kind
	 * may still use the mirror until the loop goes on, so leave freeing it to a completion.
	 */
	void (*done)(struct inquiry *inquiry);

	/* The outcome: 0, or a negative errno with the error filled in. */
	int result;
	struct error error;
	struct mirror_probe found;
	char *text; /* the document, malloc()ed */

	void *private;	     /* only for the mirror's kind */
	struct asker *asker; /* only for fetcher.c */
};

/*
 * Asks, and waits for the answer; not on the fetcher's thread. Without a fetcher, only mirrors of
 * this machine can be asked. These return 0, or a negative errno with the error filled in.
 */
int mirror_probe(struct fetcher *fetcher, struct mirror *mirror, uint32_t timeout_ms,
		 struct mirror_probe *probe, struct error *error);
/* `*text` is JSON about `name`, malloc()ed. */
int mirror_look_up(struct fetcher *fetcher, struct mirror *mirror, const char *name,
		   uint32_t timeout_ms, char **text, struct error *error);
