/* SPDX-License-Identifier: MIT */
/* How long a run is waited for. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "fetch/run.h"

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
