/* SPDX-License-Identifier: MIT */
/* What front.c (runs, logins and messages) and life.c (the process) share; for nobody else. */
#ifndef LAZY_PROCESS_INTERNAL_H
#define LAZY_PROCESS_INTERNAL_H

#include <stdbool.h>
#include <stdint.h>

#include "lazy/core.h"
#include "lazy/fetcher.h"
#include "lazy/process/channel.h"
#include "lazy/process/spawn.h"
#include "lazy/run.h"

struct uv_poll_s;

/* A run, and its window. The process has it from START to OVER. */
struct slot {
	struct front *front;
	struct run *run; /* NULL: it was given up, and the process has not said OVER yet */
	bool sent, over;
	uint32_t length, arrived, taken, told;
	struct timer deadline;
};

enum state {
	STATE_NONE,
	STATE_STARTING, /* a job, with `starting` */
	STATE_UP,
	STATE_ENDING, /* a job */
};

struct known {
	struct mirror *mirror;
	bool told;   /* the process has it */
	bool asking; /* its login is being read */
};

struct front {
	struct fetcher_attachment attachment;
	struct fetcher *fetcher;
	struct timer_queue timers;
	struct process_counts *counts;
	enum state state;
	struct slot slots[CHANNEL_SLOTS];
	unsigned busy; /* slots */
	struct known *known;
	unsigned known_count, known_room, logins;

	/* The process. */
	unsigned generation;
	struct spawned process;
	struct channel channel;
	struct uv_poll_s *poll;
	bool waits_to_send;
	struct timer tick, retry;
	unsigned unanswered; /* ticks */
	unsigned idle;	     /* the same */
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
/* Returns false where no process of ours would say that. */
bool front_take(struct front *front, const struct channel_head *head, const uint8_t *body);

/* life.c */

/* Sets the timers up; `front` has its fetcher. */
void life_init(struct front *front);
/* NULL: btrfs-ublk-fetch beside this program. */
void life_use(const char *program);
/* Starts a process if there is none, at once or after a while. */
void life_need(struct front *front);
/* Sends what was added for it. */
void life_flush(struct front *front);
/* Ends it, and fails its runs. `why`: NULL where it is not needed any more. */
void life_end(struct front *front, const char *why);
/* Ends it, when there are no runs any more, and nobody will ask what has become of it. */
void life_close(struct front *front);

#endif
