/* SPDX-License-Identifier: MIT */
/* The time that deadlines refer to: CLOCK_MONOTONIC. */
#pragma once

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <time.h>

#define NS_PER_MS 1000000ull
#define NS_PER_S 1000000000ull

static inline uint64_t clock_now_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (uint64_t)now.tv_sec * NS_PER_S + (uint64_t)now.tv_nsec;
}

static inline uint64_t clock_now_ms(void)
{
	return clock_now_ns() / NS_PER_MS;
}

/* Returns false when the thread has not ended within `wait_ms`; it must be joined later. */
static inline bool clock_join(pthread_t thread, unsigned wait_ms)
{
	uint64_t until_ns = clock_now_ns() + wait_ms * NS_PER_MS;
	struct timespec until = {
		.tv_sec = (time_t)(until_ns / NS_PER_S),
		.tv_nsec = (long)(until_ns % NS_PER_S),
	};

	/* NB: pthread_timedjoin_np() would wait for hours when the clock is set back. */
	return !pthread_clockjoin_np(thread, NULL, CLOCK_MONOTONIC, &until);
}
