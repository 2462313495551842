/* SPDX-License-Identifier: MIT */
/* What the core does with runs (fetch/run.h). */
#pragma once

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
 * have begun without a reader.
 */
void run_joined(struct unit *unit, uint64_t deadline_ns);
/* To be called when a unit of it is not wanted any more. */
void run_trim(struct run *run);
/* Has those go on that have waited for memory. */
void runs_resume(struct core *core);
/* The unit that arrives is whole, and has no part in it any more. */
void run_leave(struct run *run);
void run_free(struct run *run);
