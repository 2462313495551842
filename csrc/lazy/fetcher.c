/* SPDX-License-Identifier: MIT */
/* The fetcher's threads, its loop and messages, and how it ends. */
#include "lazy/fetcher.h"

#include <errno.h>
#include <openssl/evp.h>
#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <unistd.h>
#include <uv.h>

#include "base/clock.h"
#include "base/crypto.h"
#include "base/message.h"
#include "base/relaxed.h"
#include "content/layout.h"
#include "fetch/attachment.h"
#include "fetch/fetcher_ops.h"
#include "fetch/inquiry.h"
#include "lazy/complete.h"
#include "lazy/core.h"
#include "lazy/prefetch.h"
#include "lazy/read.h"

enum {
	WORKERS_MIN = 2,
	WORKERS_MAX = 8,
	/* for when all others wait for pins, because a large addition holds the map */
	WORKERS_SPARE = 1,
	/*
	 * One host may have two thirds of both (choice.c), which is 64 units of the default size.
	 */
	TRANSFERS_DEFAULT = 96,
	BUFFER_DEFAULT_BYTES = 24 << 20,
	STOP_WAIT_MS = 5000,
	/* these threads mostly wait: for disks, and for servers of network file systems */
	MIRROR_WORKERS = 8,
	MIRROR_WORKERS_SPARE = 2, /* left for credentials, whatever hangs */
	CACHE_WORKERS = 2,
	/* NB: not the idle class, as others wait for its locks. */
	PUTTER_NICE = 10,
	/* Where more units are in flight, the fetcher begins many reads for each time that it wakes. */
	BEGIN_HERE_MAX = 8,
};

struct server_fetcher {
	struct fetcher fetcher; /* what others know of it */
	struct core core;
	struct prefetch prefetch;
	struct complete complete;
	unsigned worker_count;

	uv_loop_t loop;
	uv_poll_t wake;
	uv_check_t after_wait;
	uv_prepare_t before_wait;
	uv_idle_t has_more; /* something is left, so the loop does not wait */
	pthread_t thread;
	/* Its holder has the core and the loop: the fetcher's thread but while it waits, or a reader. */
	pthread_mutex_t lock;
	bool inside; /* the fetcher's thread has it */
	/* for mirrors; they may hang with a file system that does not answer */
	struct worker_pool mirror_workers;
	struct worker_pool spawners; /* one thread, or none */
	unsigned mirror_jobs;	     /* some belong to fetches that were given up */
	unsigned inquiries;	     /* of threads that wait */
	bool stopping;		     /* atomic */
};

struct read_ahead_message {
	struct completion sent;
	struct source *source;
	uint64_t first, last; /* units */
};

static struct server_fetcher *server_of(struct fetcher *fetcher)
{
	return container_of(fetcher, struct server_fetcher, fetcher);
}

/* See fetcher_ops.h: what the loop calls comes here first after each wait. */
static void enter(struct fetcher *fetcher)
{
	struct server_fetcher *server = server_of(fetcher);

	if (!server->inside)
		pthread_mutex_lock(&server->lock);
	server->inside = true;
}

static void leave(struct server_fetcher *fetcher)
{
	fetcher->inside = false;
	pthread_mutex_unlock(&fetcher->lock);
}

static void close_handles(struct server_fetcher *fetcher)
{
	uv_close((uv_handle_t *)&fetcher->after_wait, NULL);
	uv_close((uv_handle_t *)&fetcher->before_wait, NULL);
	uv_close((uv_handle_t *)&fetcher->has_more, NULL);
	uv_close((uv_handle_t *)&fetcher->wake, NULL);
	timer_queue_deinit(&fetcher->core.timers);
}

/* Once the fetcher is ending, checks whether all has ended. */
static void try_to_end(struct server_fetcher *fetcher)
{
	const struct core *core = &fetcher->core;

	if (core->units || core->look_ups || fetcher->mirror_jobs || fetcher->inquiries ||
	    fetcher->complete.looking || fetcher->fetcher.logins)
		return;
	close_handles(fetcher);
	attachments_close(&fetcher->fetcher);
}

static void do_nothing(uv_idle_t *has_more)
{
}

static void step(struct server_fetcher *fetcher)
{
	if (core_step(&fetcher->core))
		uv_idle_start(&fetcher->has_more, do_nothing);
	else
		uv_idle_stop(&fetcher->has_more);
}

/* Takes what sockets and messages have put. */
static void on_waited(uv_check_t *after_wait)
{
	struct server_fetcher *fetcher = after_wait->data;

	enter(&fetcher->fetcher);
	step(fetcher);
}

/* Takes what timers have put. It began first, so of all that is called before a wait, it is last. */
static void on_wait(uv_prepare_t *before_wait)
{
	struct server_fetcher *fetcher = before_wait->data;

	enter(&fetcher->fetcher);
	step(fetcher);
	if (fetcher->core.ending && !uv_is_closing((uv_handle_t *)before_wait))
		try_to_end(fetcher);
	leave(fetcher);
}

static void on_wake(uv_poll_t *wake, int status, int events)
{
	struct server_fetcher *fetcher = wake->data;
	struct core *core = &fetcher->core;
	eventfd_t unused;
	bool stopping;

	enter(&fetcher->fetcher);
	/* First, so that later messages wake the loop again. */
	eventfd_read(core->wake_fd, &unused);
	stopping = __atomic_load_n(&fetcher->stopping, __ATOMIC_ACQUIRE);
	core_receive(core);
	if (relaxed_load(&core->abandoned))
		reads_fail_all(core, -EIO);
	if (stopping && !core->ending) {
		/* All readers have been answered, and none is any more; see fetcher_stop(). */
		__atomic_store_n(&core->ending, true, __ATOMIC_RELEASE);
		fetcher->fetcher.ending = true;
		prefetch_abandon(&fetcher->prefetch);
		complete_abandon(&fetcher->complete);
		core_stop(core);
	}
}

static void *fetcher_main(void *argument)
{
	struct server_fetcher *fetcher = argument;

	lazy_thread_init("fetcher", CONFINE_FETCH);
	enter(&fetcher->fetcher); /* for what comes before the first wait */
	uv_run(&fetcher->loop, UV_RUN_DEFAULT);
	if (fetcher->inside)
		leave(fetcher);
	return NULL;
}

static void has_finished(struct worker_pool *pool, struct pool_job *job)
{
	core_send(pool->owner, &job->ended);
}

static void mirror_job_ended(struct core *core, struct completion *completion)
{
	struct pool_job *job = container_of(completion, struct pool_job, ended);

	server_of(core->fetcher)->mirror_jobs--;
	job->done(job);
}

static void submit(struct fetcher *fetcher, struct pool_job *job)
{
	struct server_fetcher *server = server_of(fetcher);

	job->ended.take = mirror_job_ended;
	server->mirror_jobs++;
	worker_pool_submit(&server->mirror_workers, job);
}

static void spawn(struct fetcher *fetcher, struct pool_job *job)
{
	struct server_fetcher *server = server_of(fetcher);

	job->ended.take = mirror_job_ended;
	server->mirror_jobs++;
	worker_pool_submit(&server->spawners, job);
}

static bool cancel(struct fetcher *fetcher, struct pool_job *job)
{
	struct server_fetcher *server = server_of(fetcher);
	bool back = worker_pool_cancel(&server->mirror_workers, job);

	server->mirror_jobs -= back;
	return back;
}

static int init_loop(struct server_fetcher *fetcher)
{
	int err = uv_loop_init(&fetcher->loop);

	if (err)
		return err;
	fetcher->loop.data = &fetcher->fetcher;
	fetcher->core.wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	if (fetcher->core.wake_fd < 0)
		return -errno;
	fetcher->wake.data = fetcher->after_wait.data = fetcher->before_wait.data = fetcher;
	uv_check_init(&fetcher->loop, &fetcher->after_wait);
	uv_check_start(&fetcher->after_wait, on_waited);
	uv_prepare_init(&fetcher->loop, &fetcher->before_wait);
	uv_prepare_start(&fetcher->before_wait, on_wait);
	uv_idle_init(&fetcher->loop, &fetcher->has_more);
	err = uv_poll_init(&fetcher->loop, &fetcher->wake, fetcher->core.wake_fd);
	if (!err)
		err = uv_poll_start(&fetcher->wake, UV_READABLE, on_wake);
	if (!err)
		err = timer_queue_init(&fetcher->core.timers, &fetcher->loop);
	return err;
}

static unsigned count_cpus(void)
{
	cpu_set_t cpus;

	return sched_getaffinity(0, sizeof(cpus), &cpus) ? 1 : (unsigned)CPU_COUNT(&cpus);
}

static void set_options(struct server_fetcher *fetcher, const struct fetcher_options *options)
{
	unsigned cpus = count_cpus();

	fetcher->worker_count = options->workers   ? options->workers :
				cpus < WORKERS_MIN ? WORKERS_MIN :
				cpus > WORKERS_MAX ? WORKERS_MAX :
						     cpus;
	fetcher->core.options = (struct core_options){
		.max_transfers = options->max_transfers ?: TRANSFERS_DEFAULT,
		.max_buffer_bytes = options->max_buffer_bytes ?: BUFFER_DEFAULT_BYTES,
		.run_bytes = options->run_bytes,
		.changed_ms = options->changed_ms,
		.unhealthy_ms = options->unhealthy_ms,
		.silent_ms = options->silent_ms,
	};
}

static int start_threads(struct server_fetcher *fetcher, bool spawns)
{
	struct core *core = &fetcher->core;
	const struct {
		struct worker_pool *pool, settings;
		unsigned count;
	} pools[] = {
		{ &core->workers,
		  { .name = "fetch-worker",
		    .role = CONFINE_FETCH,
		    .max_per_place = fetcher->worker_count,
		    .spare = WORKERS_SPARE },
		  fetcher->worker_count + WORKERS_SPARE },
		{ &fetcher->mirror_workers,
		  { .name = "mirror-worker",
		    .role = CONFINE_HELPERS,
		    .max_per_place = HOST_BLOCKING_MAX,
		    .spare = MIRROR_WORKERS_SPARE },
		  MIRROR_WORKERS },
		{ &fetcher->spawners, { .name = "spawner", .role = CONFINE_SPAWN }, spawns },
		{ &core->cache_workers,
		  { .name = "cache-worker", .role = CONFINE_FETCH },
		  core->cache ? CACHE_WORKERS : 0 },
		{ &core->putters,
		  { .name = "cache-putter", .role = CONFINE_FETCH, .nice = PUTTER_NICE },
		  core->cache ? 1 : 0 },
	};
	int err = lazy_small_stacks();

	for (size_t i = 0; !err && i < sizeof(pools) / sizeof(*pools); i++) {
		struct worker_pool *pool = pools[i].pool;

		*pool = pools[i].settings;
		pool->finished = has_finished;
		pool->owner = core;
		if (pools[i].count)
			err = worker_pool_start(pool, pools[i].count);
	}
	if (!err)
		err = -pthread_create(&fetcher->thread, NULL, fetcher_main, fetcher);
	return err;
}

static void free_all(struct server_fetcher *fetcher)
{
	struct core *core = &fetcher->core;

	worker_pool_stop(&core->workers, 0);
	worker_pool_stop(&fetcher->mirror_workers, 0);
	worker_pool_stop(&fetcher->spawners, 0);
	worker_pool_stop(&core->cache_workers, 0);
	worker_pool_stop(&core->putters, 0);
	core_receive(core); /* the workers' last messages */
	while (core_step(core))
		;
	uv_loop_close(&fetcher->loop);
	close(core->wake_fd);
	core_deinit(core);
	prefetch_deinit(&fetcher->prefetch);
	complete_deinit(&fetcher->complete);
	EVP_MD_CTX_free(core->hash);
	EVP_MD_free(core->sha256);
	pthread_mutex_destroy(&fetcher->lock);
	free(fetcher);
}

void fetcher_abandon(struct fetcher *fetcher)
{
	struct core *core = &server_of(fetcher)->core;

	relaxed_store(&core->abandoned, true);
	eventfd_write(core->wake_fd, 1);
}

int fetcher_stop(struct fetcher *fetcher)
{
	struct server_fetcher *server = server_of(fetcher);

	__atomic_store_n(&server->stopping, true, __ATOMIC_RELEASE);
	fetcher_abandon(fetcher);
	if (!clock_join(server->thread, STOP_WAIT_MS)) {
		/* What has delivered to readers may be closed now. */
		(void)__atomic_load_n(&server->core.ending, __ATOMIC_ACQUIRE);
		return -ETIMEDOUT;
	}
	free_all(server);
	return 0;
}

/* Whether the fetcher's thread has nothing to do first. */
static bool is_quiet(const struct core *core)
{
	return !core->ending && list_is_empty(&core->completions) &&
	       list_is_empty(&core->unstarted) && !relaxed_load(&core->messages.newest);
}

/* Returns false where the fetcher's thread has to begin the read. */
static bool begin_here(struct server_fetcher *server, struct lazy_read *read)
{
	struct fetcher *fetcher = &server->fetcher;
	struct core *core = &server->core;
	bool begins, wakes = false;

	if (relaxed_load(&core->counts.units_in_flight) >= BEGIN_HERE_MAX ||
	    pthread_mutex_trylock(&server->lock))
		return false;
	begins = is_quiet(core);
	if (begins) {
		fetcher->visited = core->visited = true;
		read_begin(core, read);
		wakes = core_visit(core) || fetcher->wanted;
		fetcher->visited = core->visited = fetcher->wanted = false;
	}
	pthread_mutex_unlock(&server->lock);
	if (wakes)
		eventfd_write(core->wake_fd, 1);
	return begins;
}

void fetcher_read(struct fetcher *fetcher, struct lazy_read *read)
{
	struct server_fetcher *server = server_of(fetcher);

	if (!begin_here(server, read))
		read_send(&server->core, read);
}

static void read_ahead(struct core *core, struct completion *completion)
{
	struct read_ahead_message *message =
		container_of(completion, struct read_ahead_message, sent);

	if (!relaxed_load(&core->abandoned)) {
		for (uint64_t unit = message->first; unit <= message->last; unit++)
			unit_read_ahead(core, message->source, unit);
	}
	free(message);
}

void fetcher_read_ahead(struct fetcher *fetcher, struct source *source, uint64_t offset,
			uint64_t length)
{
	struct read_ahead_message *message;

	if (offset >= source->size || !length)
		return;
	message = calloc(1, sizeof(*message));
	if (!message)
		return;
	message->source = source;
	message->first = unit_of(source, offset);
	message->last = unit_of(source, offset + length - 1);
	message->sent.take = read_ahead;
	core_send(&server_of(fetcher)->core, &message->sent);
}

/* A thread that waits for an answer. */
struct asker {
	struct inquiry *inquiry;
	struct completion sent; /* first there, then back */
	pthread_mutex_t lock;
	pthread_cond_t changed;
	bool answered;
};

static void tell_asker(struct core *core, struct completion *completion)
{
	struct asker *asker = container_of(completion, struct asker, sent);

	server_of(core->fetcher)->inquiries--;
	pthread_mutex_lock(&asker->lock);
	asker->answered = true;
	/* NB: it ends with the lock. */
	pthread_cond_signal(&asker->changed);
	pthread_mutex_unlock(&asker->lock);
}

/* Only puts that: until the loop goes on, the kind may still use the mirror. */
static void inquiry_done(struct inquiry *inquiry)
{
	struct asker *asker = inquiry->asker;

	asker->sent.take = tell_asker;
	completion_put(&server_of(inquiry->fetcher)->core, &asker->sent);
}

static void take_inquiry(struct core *core, struct completion *completion)
{
	struct inquiry *inquiry = container_of(completion, struct asker, sent)->inquiry;

	server_of(core->fetcher)->inquiries++;
	if (!core->ending) {
		inquiry->mirror->ops->inquire(inquiry);
		return;
	}
	inquiry->result = error_set(&inquiry->error, -ECANCELED, "the server ends");
	inquiry_done(inquiry);
}

static void inquire(struct fetcher *fetcher, struct inquiry *inquiry)
{
	struct asker asker = {
		.inquiry = inquiry,
		.sent = { .take = take_inquiry },
		.lock = PTHREAD_MUTEX_INITIALIZER,
		.changed = PTHREAD_COND_INITIALIZER,
	};

	inquiry->asker = &asker;
	inquiry->done = inquiry_done;
	core_send(&server_of(fetcher)->core, &asker.sent);
	pthread_mutex_lock(&asker.lock);
	while (!asker.answered)
		pthread_cond_wait(&asker.changed, &asker.lock);
	pthread_mutex_unlock(&asker.lock);
}

static const struct fetcher_ops ops = {
	.submit = submit,
	.cancel = cancel,
	.spawn = spawn,
	.inquire = inquire,
	.enter = enter,
};

int fetcher_start(const struct fetcher_options *options, struct store *store, struct cache *cache,
		  struct fetcher **fetcher)
{
	struct server_fetcher *made = calloc(1, sizeof(*made));
	struct core *core;
	int err;

	if (!made)
		return -ENOMEM;
	core = &made->core;
	pthread_mutex_init(&made->lock, NULL);
	made->fetcher.ops = &ops;
	made->fetcher.loop = &made->loop;
	core->fetcher = &made->fetcher;
	core->store = store;
	core->cache = cache;
	set_options(made, options);
	core_init(core);
	prefetch_init(&made->prefetch, core);
	complete_init(&made->complete, core, &made->prefetch);
	err = init_loop(made);
	if (err) {
		free(made);
		return err;
	}
	/* Fetched once, because EVP_sha256() would look it up each time, under a lock. */
	core->sha256 = crypto_is_ready() ? EVP_MD_fetch(NULL, "SHA256", NULL) : NULL;
	core->hash = EVP_MD_CTX_new();
	err = core->sha256 && core->hash ? start_threads(made, options->spawns) : -ENOMEM;
	if (!err) {
		*fetcher = &made->fetcher;
		return 0;
	}
	/* No thread runs the loop now, so run it here to close its handles. */
	close_handles(made);
	uv_run(&made->loop, UV_RUN_DEFAULT);
	free_all(made);
	return err;
}

struct prefetch *fetcher_prefetch(struct fetcher *fetcher)
{
	return &server_of(fetcher)->prefetch;
}

struct complete *fetcher_complete(struct fetcher *fetcher)
{
	return &server_of(fetcher)->complete;
}

json_t *fetcher_stats_json(struct fetcher *fetcher)
{
	return fetchstats_json(&server_of(fetcher)->core);
}
