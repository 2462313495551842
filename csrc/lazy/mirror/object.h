/* SPDX-License-Identifier: MIT */
/*
 * Runs and probes of a mirror that is one object behind a URL, and whose data begin with a struct
 * remote.
 */
#ifndef LAZY_MIRROR_OBJECT_H
#define LAZY_MIRROR_OBJECT_H

#include "lazy/mirror/response.h"
#include "lazy/source.h"

struct object_ops {
	char *(*url)(const struct mirror *mirror); /* malloc()ed; NULL: no memory */
	/*
	 * Returns the identity of the object in this response, malloc()ed, or NULL. The pointer
	 * itself may be NULL: the object has always the same.
	 */
	char *(*identity)(const struct response *response);
	/* What to send as If-Range. */
	const char *(*validator)(const char *identity);
};

/* Returns the strong ETag, else Last-Modified: malloc()ed, or NULL. */
char *object_identity(const struct response *response);

int object_probe(const struct object_ops *ops, struct mirror *mirror, uint32_t timeout_ms,
		 struct mirror_probe *probe, struct error *error);
void object_start(const struct object_ops *ops, struct run *run);
void object_cancel(struct run *run);
void object_resume(struct run *run);

struct exchange;
/* Adds a hint to the error of a failed exchange; `kind` is for hint.h. */
void object_add_hint(const struct exchange *exchange, const char *kind, struct error *error);

/*
 * Where runs go instead, if others ask the servers: each is as in struct mirror_ops. To be set before
 * there are other threads.
 */
struct object_front {
	void (*start)(struct run *run);
	void (*cancel)(struct run *run);
	void (*resume)(struct run *run);
};
extern const struct object_front *object_front; /* NULL: nowhere else */

#endif
