/* SPDX-License-Identifier: MIT */
/*
 * What a control connection may ask for, and the answers (docs/design/protocol.md). A kind of
 * request is a function and CONTROL_REQUEST(kind) behind it; nothing else has to name it.
 */
#ifndef SERVER_CONTROL_REQUEST_H
#define SERVER_CONTROL_REQUEST_H

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <time.h>

struct frontend;

enum { CONTROL_PROTOCOL = 1 };

/* What requests are about. */
struct control_subject {
	struct frontend *frontend;
	json_t *ready;		 /* the ready event */
	struct timespec started; /* CLOCK_BOOTTIME */
};

enum control_action {
	CONTROL_GO_ON,
	CONTROL_STOP,	   /* asked for */
	CONTROL_HAND_OVER, /* asked for, and possible */
	CONTROL_GONE,	   /* the peer has closed its end, or died */
};

/* A request that takes its time, on a thread of its own (control_hands.h). */
struct control_call {
	json_t *message; /* an object; the work may take keys out of it */
	int fd;		 /* a descriptor that came with it, or -1 */
	bool over;	 /* nobody waits for the answer any more; see control_call_is_over() */
};

static inline bool control_call_is_over(const struct control_call *call)
{
	return __atomic_load_n(&call->over, __ATOMIC_RELAXED);
}

struct control_kind {
	const char *name;
	/* NULL: always. Else, when this is false, the request is not known. */
	bool (*available)(void);

	/*
	 * One of the two. `answer` is given on the thread that all wait for, and has no time; `work`
	 * on another one, with the host's view of files, and may wait. `*reply`, or what `work`
	 * returns, is a new reference, or NULL when memory is short.
	 */
	enum control_action (*answer)(const struct control_subject *subject, json_t **reply);
	json_t *(*work)(struct control_call *call);
};

/* Linked into one array. */
#define CONTROL_REQUEST(kind)                                \
	static const struct control_kind *const kind##_entry \
		__attribute__((used, section("control_kinds"))) = &kind

/*
 * The kind of request that `message` is; NULL: none, and `*reply` says why, or is NULL when memory
 * is short.
 */
const struct control_kind *control_kind_of(const json_t *message, json_t **reply);
/* Whether any that is available has `work`. */
bool control_has_work(void);

/* {"error": TEXT}; NULL when memory is short. */
json_t *control_error(const char *text);

#endif
