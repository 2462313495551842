/* SPDX-License-Identifier: MIT */
/*
 * core-shell SEED TURNS RUN_UNITS WHOLE [CACHE]: the core of the fetcher without its thread. A kind
 * of mirror of this program lets runs of at most RUN_UNITS end in any order, also while they begin;
 * of WHOLE in 100 runs, all of the object comes. There are random subscriptions, ends of them,
 * completions, failures, steps, and visits of readers' threads. Prints what was delivered, failed
 * and ended, how many units the longest run had, and how often one went on after it had waited for
 * memory. Fails when data are wrong, or something is left at the end. With a cache, what is right is
 * also put there.
 */
#include <errno.h>
#include <limits.h>
#include <openssl/evp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>
#include <uv.h>

#include "base/keys.h"
#include "base/message.h"
#include "content/cache.h"
#include "content/layout.h"
#include "fetch/run.h"
#include "lazy/core.h"

enum {
	SOURCES = 3,
	SOURCE_UNITS = 40,
	UNIT_BYTES = 4096,
	BUFFER_UNITS = 24, /* so few that memory is short */
	WANTED_MAX = 256,
	RUNNING_MAX = 64,
	WORKERS = 2,
	SETTLE_MS = 300, /* how long what rests may still begin again */
	END_S = 30,
};

struct wanted {
	struct subscription subscription;
	struct source *source;
	uint64_t number;
	bool runs;
};

static struct core core;
static uv_loop_t loop;
static struct source *sources[SOURCES];
static struct wanted wanted[WANTED_MAX];
static struct run *running[RUNNING_MAX];
static unsigned delivered, failed, ended, resumed, run_units, whole, longest;
static bool gentle; /* all that is asked succeeds from now on, when it begins */
static bool held;   /* nothing ends by itself */
static uint64_t random_state;

static unsigned chance(unsigned count)
{
	random_state ^= random_state << 13;
	random_state ^= random_state >> 7;
	random_state ^= random_state << 17;
	return (unsigned)((random_state >> 20) % count);
}

static void require(bool right, const char *what)
{
	if (right)
		return;
	msg_error("%s", what);
	exit(EXIT_FAILED);
}

static uint8_t byte_of(const struct source *source, uint64_t offset)
{
	return (uint8_t)(source->id * 101 + offset / UNIT_BYTES * 7 + offset % 251);
}

/* A kind of mirror: `"place"` is the number of its host. */

struct random_mirror {
	uint64_t place;
};

static int random_parse(struct mirror *mirror, json_t *keys, struct error *error)
{
	struct random_mirror *private = mirror->private;

	return keys_take_u64(keys, "place", true, &private->place, error);
}

static const char *random_host(const struct mirror *mirror, char *text, size_t bytes)
{
	const struct random_mirror *private = mirror->private;

	snprintf(text, bytes, "place %llu", (unsigned long long)private->place);
	return text;
}

static void keep_running(struct run *run)
{
	for (unsigned i = 0; i < RUNNING_MAX; i++) {
		if (!running[i]) {
			running[i] = run;
			return;
		}
	}
	require(false, "too many are running");
}

/* Returns false when there is no place for so many bytes. */
static bool give(struct run *run, uint64_t bytes)
{
	uint64_t given = (uintptr_t)run->private;
	struct iovec part;

	while (bytes && given < run->length) {
		if (!run->sink->space(run, &part, 1))
			return false;
		if (part.iov_len > bytes)
			part.iov_len = bytes;
		for (size_t i = 0; i < part.iov_len; i++)
			((uint8_t *)part.iov_base)[i] =
				byte_of(run->mirror->source, run->offset + given + i);
		given += part.iov_len;
		bytes -= part.iov_len;
		run->private = (void *)(uintptr_t)given;
		run->sink->take(run, part.iov_len);
	}
	return true;
}

/* It goes on when there is a place for the rest. */
static void succeed(struct run *run)
{
	if (!give(run, run->length)) {
		keep_running(run);
		return;
	}
	run->result = 0;
	run->sink->over(run);
}

static void end_run(struct run *run)
{
	if (gentle || chance(3)) {
		succeed(run);
		return;
	}
	if (chance(2))
		give(run, chance(run->length));
	run->cut = chance(2);
	run_failed(run, run->private ? FETCH_TRANSIENT : chance(FETCH_WRONG + 1),
		   error_set(&run->error, -EIO, "it shall fail"));
}

static void random_start(struct run *run)
{
	unsigned free_places = 0;

	if (longest < run->count)
		longest = run->count;
	/* All of the object comes. */
	run->whole = !held && run->widens && chance(100) < whole;
	if (run->whole)
		run->sink->widen(run);
	for (unsigned i = 0; i < RUNNING_MAX; i++)
		free_places += !running[i];
	if (!free_places || (!held && (gentle || !chance(3)))) {
		end_run(run);
		return;
	}
	if (chance(2))
		give(run, chance(run->length));
	keep_running(run);
}

static bool random_ready(const struct run *run)
{
	(void)run;
	return chance(2);
}

static void random_cancel(struct run *run)
{
	for (unsigned i = 0; i < RUNNING_MAX; i++) {
		if (running[i] == run) {
			running[i] = NULL;
			run_failed(run, FETCH_TRANSIENT,
				   error_set(&run->error, -ECANCELED, "cancelled"));
			return;
		}
	}
	require(false, "a run was cancelled that is over");
}

static void random_resume(struct run *run)
{
	resumed++;
	give(run, chance(run->length));
}

static const struct mirror_ops random_ops = {
	.name = "random",
	.private_bytes = sizeof(struct random_mirror),
	.parse = random_parse,
	.start = random_start,
	.ready = random_ready,
	.cancel = random_cancel,
	.resume = random_resume,
	.host = random_host,
};
MIRROR_KIND(random_ops);

/* Subscriptions. */

static void end_one(struct wanted *one)
{
	if (one->runs)
		ended++;
	one->runs = false;
	subscription_end(&one->subscription);
}

static void over(struct subscription *subscription)
{
	struct wanted *one = container_of(subscription, struct wanted, subscription);

	require(one->runs, "a subscription was called that had ended");
	one->runs = false;
	/* Others may be of the same unit, and would be next. */
	while (!chance(8))
		end_one(&wanted[chance(WANTED_MAX)]);
}

static void on_right(struct subscription *subscription, const struct unit *unit)
{
	const struct wanted *one = container_of(subscription, struct wanted, subscription);

	require(one->source == unit->source && one->number == unit->number, "another unit came");
	for (uint32_t i = 0; i < unit->length; i++)
		require(unit->data[i] == byte_of(unit->source, unit->number * UNIT_BYTES + i),
			"a byte is wrong");
	delivered++;
	over(subscription);
}

static void on_failed(struct subscription *subscription, int err)
{
	require(err < 0, "it has failed without an error");
	failed++;
	over(subscription);
}

static const struct subscription_ops kinds[] = {
	{ .right = on_right, .failed = on_failed, .urgency = URGENCY_DEMAND, .rounds = UINT_MAX },
	{ .right = on_right,
	  .failed = on_failed,
	  .until_stored = true,
	  .urgency = URGENCY_BACKGROUND,
	  .rounds = 2 },
};

static void want(struct wanted *one, struct source *source, uint64_t number, unsigned kind,
		 uint64_t deadline_ns)
{
	*one = (struct wanted){
		.subscription = { .ops = &kinds[kind], .deadline_ns = deadline_ns },
		.source = source,
		.number = number,
		.runs = true,
	};
	require(!subscribe(&core, &one->subscription, source, number), "no memory");
}

static void want_any(void)
{
	struct wanted *one = &wanted[chance(WANTED_MAX)];
	unsigned kind = chance(4) == 0;
	uint64_t deadline_ns = chance(8) ? clock_now_ns() + chance(6) * NS_PER_MS :
					   FETCHER_NO_DEADLINE;

	end_one(one);
	want(one, sources[chance(SOURCES)], chance(SOURCE_UNITS), kind, kind ? 0 : deadline_ns);
}

static void end_any_run(void)
{
	unsigned place = chance(RUNNING_MAX);
	struct run *run = running[place];

	running[place] = NULL;
	if (run)
		end_run(run);
}

static void run_loop(void)
{
	uv_run(&loop, UV_RUN_NOWAIT);
	core_receive(&core);
	core_step(&core);
}

static void read_ahead_any(void)
{
	unsigned first = chance(SOURCE_UNITS), end = first + 1 + chance(16);
	struct source *source = sources[chance(SOURCES)];

	for (unsigned number = first; number < end && number < SOURCE_UNITS; number++)
		unit_read_ahead(&core, source, number);
}

static void take_turn(void)
{
	switch (chance(8)) {
	case 0:
	case 1:
	case 2:
		want_any();
		break;
	case 3:
		end_one(&wanted[chance(WANTED_MAX)]);
		break;
	case 4:
		read_ahead_any();
		break;
	case 5:
		end_any_run();
		break;
	case 6:
		core.visited = chance(2);
		if (core.visited)
			core_visit(&core);
		else
			core_step(&core);
		core.visited = false;
		break;
	default:
		run_loop();
		break;
	}
}

static void set_up(const char *cache_path)
{
	struct error error = {};

	core.options = (struct core_options){ .max_transfers = 16,
					      .max_buffer_bytes = BUFFER_UNITS * UNIT_BYTES,
					      .run_bytes = run_units * UNIT_BYTES,
					      .changed_ms = 20,
					      .unhealthy_ms = 20 };
	core_init(&core);
	core.wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	core.sha256 = EVP_MD_fetch(NULL, "SHA256", NULL);
	core.hash = EVP_MD_CTX_new();
	require(!uv_loop_init(&loop) && !timer_queue_init(&core.timers, &loop), "no loop");
	for (unsigned i = 0; i < SOURCES; i++) {
		json_t *text = json_pack("{s:i, s:i, s:[{s:s, s:i}, {s:s, s:i}]}", "size",
					 SOURCE_UNITS * UNIT_BYTES - (int)i * 100, "unit",
					 UNIT_BYTES, "mirrors", "kind", "random", "place", (int)i,
					 "kind", "random", "place", (int)i + 1);

		require(!source_parse(text, &sources[i], &error), error.text);
		sources[i]->id = i;
		memset(sources[i]->key, (int)i + 1, sizeof(sources[i]->key));
		json_decref(text);
	}
	if (cache_path)
		require(!cache_open(cache_path, &(struct cache_options){}, &core.cache, &error),
			error.text);
}

static void job_finished(struct worker_pool *pool, struct pool_job *job)
{
	(void)pool;
	core_send(&core, &job->ended);
}

static void start_workers(void)
{
	core.workers = core.cache_workers = core.putters = (struct worker_pool){
		.finished = job_finished, .name = "worker", .role = CONFINE_FETCH
	};
	require(!worker_pool_start(&core.workers, WORKERS) &&
			!worker_pool_start(&core.cache_workers, WORKERS) &&
			!worker_pool_start(&core.putters, 1),
		"no threads");
}

/* Some of them are still being fetched when the core stops. */
static void want_all(void)
{
	held = true;
	for (unsigned i = 0; i < SOURCES * SOURCE_UNITS; i++)
		want(&wanted[i], sources[i % SOURCES], i / SOURCES, 0, FETCHER_NO_DEADLINE);
	core_step(&core);
}

static void settle(void)
{
	uint64_t until_ns = clock_now_ns() + SETTLE_MS * NS_PER_MS;

	gentle = true;
	while (clock_now_ns() < until_ns) {
		end_any_run();
		run_loop();
	}
	for (unsigned i = 0; i < WANTED_MAX; i++)
		end_one(&wanted[i]);
	want_all();
	for (unsigned i = 0; i < WANTED_MAX; i++)
		end_one(&wanted[i]);
	core.ending = true;
	core_stop(&core);
	for (until_ns = clock_now_ns() + END_S * NS_PER_S; core.units || core.look_ups;) {
		require(clock_now_ns() < until_ns, "units are left");
		run_loop();
	}
}

static void check_counters(void)
{
	const struct fetch_counts *counts = &core.counts;

	require(!core.busy && !core.prefetching && !core.asked_bytes &&
			list_is_empty(&core.storing) && !core.storing_bytes &&
			!counts->buffer_bytes && !counts->unstored_bytes && !counts->units_queued,
		"something still counts");
	for (const struct host *host = core.hosts; host; host = host->next)
		require(!host->in_flight && !host->prefetching, "a host has fetches");
}

static void tear_down(void)
{
	worker_pool_stop(&core.workers, 0);
	worker_pool_stop(&core.cache_workers, 0);
	worker_pool_stop(&core.putters, 0);
	core_receive(&core);
	while (core_step(&core))
		;
	timer_queue_deinit(&core.timers);
	uv_run(&loop, UV_RUN_DEFAULT);
	uv_loop_close(&loop);
	core_deinit(&core);
	if (core.cache)
		cache_close(core.cache);
	for (unsigned i = 0; i < SOURCES; i++)
		source_free(sources[i]);
	EVP_MD_CTX_free(core.hash);
	EVP_MD_free(core.sha256);
	close(core.wake_fd);
}

int main(int argc, char **argv)
{
	unsigned turns;

	message_init("core-shell");
	if (argc < 5 || argc > 6) {
		msg_error("usage: core-shell SEED TURNS RUN_UNITS WHOLE [CACHE]");
		return EXIT_USAGE;
	}
	random_state = strtoull(argv[1], NULL, 10) * 2654435769u + 1;
	turns = (unsigned)strtoul(argv[2], NULL, 10);
	run_units = (unsigned)strtoul(argv[3], NULL, 10);
	whole = (unsigned)strtoul(argv[4], NULL, 10);
	set_up(argc > 5 ? argv[5] : NULL);
	start_workers();
	while (turns--)
		take_turn();
	settle();
	check_counters();
	tear_down();
	printf("%u %u %u %u %u\n", delivered, failed, ended, longest, resumed);
	return EXIT_OK;
}
