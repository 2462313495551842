/* SPDX-License-Identifier: MIT */
/*
 * Runs and inquiries of a mirror that is one object behind a URL, and whose data begin with a struct
 * remote.
 */
#pragma once

#include "content/identity.h"
#include "content/source.h"
#include "fetch/mirror/remote.h"

struct object_ops {
	char *(*url)(const struct mirror *mirror); /* malloc()ed; NULL: no memory */
	/*
	 * Writes the identity of the object in this response, and returns that, or NULL where it has
	 * none. The pointer itself may be NULL: the object has always the same.
	 */
	const char *(*identity)(const struct response *response, char text[static IDENTITY_BYTES]);
	bool conditional; /* the identity is sent as If-Range, where it can be */
	/* Only where mirrors have names: a document's URL, as above, its media types, and its kind
	 * for hint.h. */
	char *(*document_url)(const struct mirror *mirror, const char *name);
	const char *document_types, *document_kind;
	bool (*is_document)(const char *name);
};

/* Writes ETag and Last-Modified, as identity.h has them. */
const char *object_identity(const struct response *response, char text[static IDENTITY_BYTES]);

/* Are `inquire` and `start` of kinds that have `object`. */
void object_inquire(struct inquiry *inquiry);
/* Fills in the outcome of an inquiry that has failed, printf()-like, and calls done(). */
void inquiry_failed(struct inquiry *inquiry, int err, const char *format, ...)
	__attribute__((format(printf, 3, 4)));
void object_start(struct run *run);
bool object_ready(const struct run *run);
void object_cancel(struct run *run);
void object_resume(struct run *run);
/* What all kinds that have `object` have. */
#define OBJECT_MIRROR_OPS                                                        \
	.inquire = object_inquire, .start = object_start, .ready = object_ready, \
	.cancel = object_cancel, .resume = object_resume, .cache = remote_cache

/*
 * Where runs and inquiries go instead, if others ask the servers: each is as in struct mirror_ops. To
 * be set before there are other threads.
 */
struct object_front {
	void (*start)(struct run *run);
	bool (*ready)(const struct run *run);
	void (*cancel)(struct run *run);
	void (*resume)(struct run *run);
	void (*inquire)(struct inquiry *inquiry);
};
extern const struct object_front *object_front; /* NULL: nowhere else */
