/* SPDX-License-Identifier: MIT */
/* What a control connection may ask for, and the answers; the protocol is in the README. */
#ifndef SERVER_CONTROL_REQUEST_H
#define SERVER_CONTROL_REQUEST_H

#include <jansson.h>
#include <stddef.h>
#include <time.h>

struct frontend;

enum { CONTROL_PROTOCOL = 1 };

/* What requests are about. */
struct control_subject {
	const struct frontend *frontend;
	json_t *ready;		 /* the ready event */
	struct timespec started; /* CLOCK_BOOTTIME */
};

enum control_action {
	CONTROL_GO_ON,
	CONTROL_STOP,	   /* asked for */
	CONTROL_HAND_OVER, /* asked for, and possible */
	CONTROL_GONE,	   /* the peer has closed its end, or died */
};

/*
 * Take `line`, without its end, as a request. `*reply` is a new reference, or NULL when memory is
 * short; it is to be sent before the action is taken.
 */
enum control_action control_request(const struct control_subject *subject, const char *line,
				    size_t length, json_t **reply);

/* {"error": TEXT}; NULL when memory is short. */
json_t *control_error(const char *text);

#endif
