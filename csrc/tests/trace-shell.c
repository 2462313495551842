/* SPDX-License-Identifier: MIT */
/*
 * trace-shell LEASE_MS: records while threads read all the time. Prints whether the recording is on
 * while it is renewed over two leases; when it is not (waits 10 s for its end); and when restarted.
 */
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/clock.h"
#include "base/message.h"
#include "lazy/trace.h"

enum { READERS = 2, BLOCKS = 4096, LIMIT = 1024 };

static struct trace trace;
static bool stop; /* atomic */

static void *read_on(void *unused)
{
	const struct source source = { .id = 1, .size = BLOCKS * 4096ull, .unit_bytes = 4096 };

	(void)unused;
	for (uint64_t block = 0; !relaxed_load(&stop); block = (block + 1) % BLOCKS)
		trace_note(&trace, &source, block * 4096, 4096);
	return NULL;
}

static void pause_ms(uint64_t ms)
{
	const struct timespec pause = { .tv_sec = (time_t)(ms / 1000),
					.tv_nsec = (long)(ms % 1000) * 1000000 };

	nanosleep(&pause, NULL);
}

static bool ask(uint64_t id)
{
	struct trace_entry entries[16];
	struct trace_status status;

	return trace_read(&trace, id, 0, entries, 16, &status) != -ESTALE;
}

static void say(const char *when, bool on)
{
	printf("%s: %s\n", when, on ? "on" : "over");
}

static void start(uint64_t *id)
{
	int err = trace_start(&trace, LIMIT, id);

	if (!err)
		return;
	msg_error("cannot begin a recording: %s", strerror(-err));
	exit(EXIT_FAILED);
}

int main(int argc, char **argv)
{
	uint64_t lease_ms = argc == 2 ? strtoull(argv[1], NULL, 10) : 0, id;
	pthread_t readers[READERS];
	bool on = true;

	message_init("trace-shell");
	trace_init(&trace);
	trace.lease_ns = lease_ms * NS_PER_MS;
	start(&id);
	for (unsigned i = 0; i < READERS; i++)
		pthread_create(&readers[i], NULL, read_on, NULL);

	for (unsigned i = 0; i < 16; i++) {
		pause_ms(lease_ms / 8);
		on = on && ask(id);
	}
	say("asked", on);
	/* NB: do not look with trace_read(), which would renew the lease. */
	for (unsigned i = 0; i < 1000 && __atomic_load_n(&trace.log, __ATOMIC_SEQ_CST); i++)
		pause_ms(10);
	say("left", ask(id));
	start(&id);
	say("the next", ask(id));

	relaxed_store(&stop, true);
	for (unsigned i = 0; i < READERS; i++)
		pthread_join(readers[i], NULL);
	trace_deinit(&trace);
	return EXIT_OK;
}
