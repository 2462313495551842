/* SPDX-License-Identifier: MIT */
/*
 * The requests that a control connection accepts, and their answers (docs/design/protocol.md). A
 * kind of request is a function with CONTROL_REQUEST(kind) behind it; nothing else has to name it.
 */
#pragma once

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <time.h>

struct frontend;

enum { CONTROL_PROTOCOL = 1 };

/* What requests refer to. */
struct control_subject {
	struct frontend *frontend;
	json_t *ready;		 /* the ready event */
	struct timespec started; /* CLOCK_BOOTTIME */
};

enum control_action {
	CONTROL_GO_ON,
	CONTROL_STOP,	   /* requested */
	CONTROL_HAND_OVER, /* requested, and possible */
	CONTROL_GONE,	   /* the peer has closed its end, or died */
};

/* A request that takes long, on a thread of control_pool.h. */
struct control_call {
	json_t *message; /* an object; the work may take keys out of it */
	int fd;		 /* a descriptor that came with it, or -1 */
	bool over;	 /* the client has gone; use control_call_is_over() */
};

static inline bool control_call_is_over(const struct control_call *call)
{
	return __atomic_load_n(&call->over, __ATOMIC_RELAXED);
}

struct control_kind {
	const char *name;
	/* When this returns false, the request is unknown. NULL: it is always known. */
	bool (*available)(void);

	/*
	 * A kind has one of these. `answer` is called on the main thread and must be quick. `work`
	 * is called on another thread, which sees the host's files, and may wait. `*reply`, or what
	 * `work` returns, is a new reference, or NULL when memory is short.
	 */
	enum control_action (*answer)(const struct control_subject *subject, json_t **reply);
	json_t *(*work)(struct control_call *call);
};

/* Adds a kind to an array made by the linker. */
#define CONTROL_REQUEST(kind)                                \
	static const struct control_kind *const kind##_entry \
		__attribute__((used, section("control_kinds"))) = &kind

/*
 * Returns the kind of request that `message` is; or NULL and an error in `*reply`, which is NULL
 * when memory is short.
 */
const struct control_kind *control_kind_of(const json_t *message, json_t **reply);
/* Whether any available kind has `work`. */
bool control_has_work(void);

/*
 * Returns the reply, or NULL when jansson has had losses (json_text.h) since there were `losses`:
 * parts of it may be missing.
 */
json_t *control_whole(json_t *reply, uint64_t losses);
/* Returns {"error": TEXT}, or NULL when memory is short. */
json_t *control_error(const char *text);
