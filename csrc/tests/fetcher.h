/* SPDX-License-Identifier: MIT */
/*
 * A fetcher for fuzzers of what fetches: its loop, a clock that only moves when it
 * is told to (link with -Wl,--wrap=clock_gettime), jobs that are done when the fuzzer says so, and
 * runs that check what they get.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>
#include <uv.h>

#include "fetch/attachment.h"
#include "fetch/event.h"
#include "fetch/fetcher_ops.h"
#include "fetch/run.h"

struct fuzz_request {
	struct run run;
	uint8_t *data; /* of its length, so that a sanitizer sees each byte too much */
	uint32_t filled, offered;
	bool active, waits; /* for memory */
};

extern struct fetcher fuzz_fetcher;
extern uv_loop_t fuzz_loop; /* its own; to be initialized */
extern uint64_t fuzz_now_ns;
extern uint64_t fuzz_budget; /* bytes that there is memory for */
extern unsigned fuzz_job_count;

/* For event_send_to(). */
void fuzz_drop_event(const struct event *event, const char *text);
/* Lets time pass: timers expire. */
void fuzz_pass(uint64_t ns);
/* Whether a timer is set. */
bool fuzz_has_timers(void);
/* Does one of the jobs, or all of them. */
void fuzz_do_job(unsigned number);
void fuzz_do_jobs(void);
/* Begins a run whose source, mirror, offset, length and so on are set. */
void fuzz_request_start(struct fuzz_request *request);
