/* SPDX-License-Identifier: MIT */
/* What front.c (runs, logins and messages) and life.c (the process) share. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "fetch/attachment.h"
#include "fetch/fetcher_ops.h"
#include "fetch/inquiry.h"
#include "fetch/mirror/token.h"
#include "fetch/process/channel.h"
#include "fetch/process/spawn.h"
#include "fetch/run.h"

struct uv_poll_s;

/* A run, and its window. The process has it from START to OVER. */
struct slot {
	struct front *front;
	struct run *run; /* NULL: it was given up, and the process has not said OVER yet */
	bool sent, over;
	bool widens; /* all of the object may come: `object_bytes` */
	uint32_t length, arrived, taken, told;
	uint64_t object_bytes;
	struct timer deadline;
};

enum state {
	STATE_NONE,
	STATE_STARTING, /* a job, with `starting` */
	STATE_UP,
	STATE_ENDING, /* a job */
};

struct wanted_login {
	bool reading; /* a worker reads it, perhaps for a process that has ended */
	bool wanted;  /* the process waits for it */
	/* What a token is for that the process may tell of, once; or "". */
	char token_key[TOKEN_KEY_BYTES];
};

struct known {
	struct mirror *mirror;
	bool told; /* the process has it */
	struct wanted_login login;
};

/* An inquiry. The process has it from INQUIRE to ANSWER. */
struct question {
	struct front *front;
	struct inquiry *inquiry; /* NULL: it was given up, and the process has not answered yet */
	bool sent;
	bool over; /* its mirror has to stay until its login was read */
	unsigned tries;
	struct wanted_login login;
	struct timer deadline;
};

struct front {
	struct attachment attachment;
	struct fetcher *fetcher;
	struct timer_queue timers;
	struct process_counts *counts;
	enum state state;
	struct slot slots[CHANNEL_SLOTS];
	struct question *questions; /* NULL: there never was one */
	unsigned question_count;
	unsigned busy; /* slots and questions */
	struct known *known;
	unsigned known_count;
	size_t known_room;
	unsigned logins; /* that are wanted */

	/* The process. */
	struct spawned process;
	struct channel channel;
	struct uv_poll_s *poll;
	bool waits_to_send;
	struct timer tick, retry;
	struct timer flush;   /* what a reader's thread could not send */
	bool greeted;	      /* it has said what it is */
	unsigned logins_sent; /* less those that it has said to be of no use */
	unsigned unanswered;  /* ticks */
	uint64_t busy_ns;     /* when it last had something to do */
	uint64_t began_ns;
	unsigned failures; /* in a row */
	unsigned lacked;   /* what was said of that last */

	struct pool_job job; /* of the spawner */
	struct spawned starting;
	struct error error;
	int err;
};

/* front.c */

/* The core gets its run back. The process may still have the slot. */
struct run *slot_leave(struct slot *slot);
void slot_free(struct slot *slot);
/* Sends what has waited for a process. */
void front_send_all(struct front *front);
/* Returns false where a genuine fetch process would not say that. */
bool front_take(struct front *front, const struct channel_head *head, const uint8_t *body);
struct front *front_of(struct fetcher *fetcher);
/* Whether a text has what an identity may have. */
bool front_is_plain(const char *text);
enum {
	/* The process keeps the deadlines. When it has not, the server does. */
	FRONT_GRACE_MS = 100,
	FRONT_ERRNO_MAX = 4095,
};

/* inquiries.c: as front.c does for runs. */
void front_inquire(struct inquiry *inquiry);
void questions_send(struct front *front);
/* The process has ended. Those that it had are sent to the next one, once. */
void questions_lost(struct front *front, const char *why);
/* There is no process. */
void questions_fail(struct front *front, const char *why);
bool question_take_answer(struct question *question, const uint8_t *body, size_t bytes);
/* Its login was read. */
void question_settle(struct question *question);

/* life.c */

/* Sets the timers up; `front` has its fetcher. */
void life_init(struct front *front);
/* As front_use(). */
int life_use(const char *program, unsigned idle_ms);
/* Starts a process if there is none, at once or after a while. */
void life_need(struct front *front);
/* Sends what was added for it. */
void life_flush(struct front *front);
/* Ends it, and fails its runs. `why`: NULL where it is not needed any more. */
void life_end(struct front *front, const char *why);
/* Ends it, when there are no runs any more, and its end is not waited for. */
void life_close(struct front *front);
