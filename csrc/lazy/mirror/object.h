/* SPDX-License-Identifier: MIT */
/* Fetch and probe of a mirror that is one object behind a URL, and has a struct remote. */
#ifndef LAZY_MIRROR_OBJECT_H
#define LAZY_MIRROR_OBJECT_H

#include "lazy/mirror/answer.h"
#include "lazy/source.h"

struct object_ops {
	char *(*url)(const struct mirror *mirror); /* malloc()ed; NULL: no memory */
	/* What the object of this answer is known by: malloc()ed, or NULL. NULL: always that. */
	char *(*identity)(const struct answer *answer);
	/* For If-Range. */
	const char *(*validator)(const char *identity);
};

/* By its strong ETag, else by Last-Modified: malloc()ed, or NULL. */
char *object_identity(const struct answer *answer);

int object_probe(const struct object_ops *ops, struct mirror *mirror, uint32_t timeout_ms,
		 struct mirror_probe *probe, struct complaint *complaint);
void object_fetch(const struct object_ops *ops, struct fetch *fetch);
void object_cancel(struct fetch *fetch);

#endif
