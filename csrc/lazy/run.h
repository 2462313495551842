/* SPDX-License-Identifier: MIT */
/* What the core does with runs (fetch/run.h). */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "fetch/run.h"

/* Asks that mirror for the unit, which has memory, and for neighbours that wait for its host. */
void run_begin(struct unit *unit, struct mirror *mirror, uint64_t now_ns);
/* Ends a run early, if that is possible. */
void run_cancel(struct run *run);
/* A reader waits for that unit of it. */
void run_is_demanded(struct unit *unit);
/*
 * To be called before a reader is added to a unit of it that waits until `deadline_ns`: the run may
 * have begun for nobody.
 */
void run_joined(struct unit *unit, uint64_t deadline_ns);
/* To be called when nobody wants that unit of it any more. */
void run_trim(struct run *run);
/* Has those go on that have waited for memory. */
void runs_resume(struct core *core);
/* The unit that arrives is whole, and has no part in it any more. */
void run_leave(struct run *run);
void run_free(struct run *run);

/* patience.c */

/* When an attempt for that unit at that mirror should have ended. */
uint64_t run_attempt_deadline_ns(const struct unit *unit, const struct mirror *mirror,
				 uint64_t now_ns);
/* How long an attempt may be silent when its readers wait until `deadline_ns` (0: nobody waits). */
uint64_t run_silence_ns(const struct run *run, uint64_t deadline_ns, uint64_t now_ns);
/* The latest deadline of all its readers. */
uint64_t run_last_deadline_ns(const struct run *run);
/* How long a cache or mirror may be silent before another place is asked. */
uint64_t run_first_silence_ns(const struct run *run);
/* Whether there are other mirrors, and the unit has not been tried at one yet. */
bool run_has_second(const struct run *run, uint64_t now_ns);
/* When a run that has got something will have been silent for too long. */
uint64_t run_silent_at_ns(const struct run *run, uint64_t now_ns);
