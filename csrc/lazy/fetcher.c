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
#include <time.h>
#include <unistd.h>

#include "base/message.h"
#include "base/relaxed.h"
#include "lazy/breaker.h"
#include "lazy/latency.h"
#include "lazy/layout.h"
#include "lazy/unit.h"

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
	STOP_WAIT_S = 5,
};

struct prefetch {
	struct fetcher_message message;
	struct source *source;
	uint64_t first, last; /* units */
};

/*
 * Any thread may call this. NB: uv_async_send() would make the woken thread wait until it returns,
 * and spin while the sender is preempted on the same CPU.
 */
static void wake_up(struct fetcher *fetcher)
{
	eventfd_write(fetcher->wake_fd, 1);
}

void fetcher_send(struct fetcher *fetcher, struct fetcher_message *message)
{
	if (message_queue_put(&fetcher->messages, &message->queued))
		wake_up(fetcher);
}

static void receive_messages(struct fetcher *fetcher)
{
	struct message *queued = message_queue_take(&fetcher->messages);

	while (queued) {
		struct fetcher_message *message =
			container_of(queued, struct fetcher_message, queued);

		/* The handler may free the message. */
		queued = queued->next;
		message->arrive(fetcher, message);
	}
}

/*
 * Runs before each wait of the loop once the fetcher is ending, and checks whether all has ended.
 */
static void try_to_end(uv_prepare_t *before_wait)
{
	struct fetcher *fetcher = before_wait->data;

	if (fetcher->busy || fetcher->storing || fetcher->look_ups || fetcher->mirror_jobs)
		return;
	uv_close((uv_handle_t *)&fetcher->before_wait, NULL);
	uv_close((uv_handle_t *)&fetcher->wake, NULL);
	timer_queue_deinit(&fetcher->timers);
	while (fetcher->attachments) {
		struct fetcher_attachment *attachment = fetcher->attachments;

		fetcher->attachments = attachment->next;
		attachment->close(attachment);
	}
}

static void on_wake(uv_poll_t *wake, int status, int events)
{
	struct fetcher *fetcher = wake->data;
	eventfd_t unused;
	bool stopping;

	(void)status;
	(void)events;
	/* Read the eventfd first, so that later messages wake the loop again. */
	eventfd_read(fetcher->wake_fd, &unused);
	stopping = __atomic_load_n(&fetcher->stopping, __ATOMIC_ACQUIRE);
	receive_messages(fetcher);
	if (relaxed_load(&fetcher->abandoned))
		reads_fail_all(fetcher, -EIO);
	if (stopping && !fetcher->ending) {
		/* All readers have been answered, and none is any more; see fetcher_stop(). */
		__atomic_store_n(&fetcher->ending, true, __ATOMIC_RELEASE);
		units_stop(fetcher);
		uv_prepare_start(&fetcher->before_wait, try_to_end);
	}
}

static void *fetcher_main(void *argument)
{
	struct fetcher *fetcher = argument;

	lazy_thread_init("fetcher", CONFINE_FETCH);
	uv_run(&fetcher->loop, UV_RUN_DEFAULT);
	receive_messages(fetcher);
	return NULL;
}

static void job_arrived(struct fetcher *fetcher, struct fetcher_message *message)
{
	struct pool_job *job = container_of(message, struct pool_job, message);

	(void)fetcher;
	job->done(job);
}

static void own_finished(struct worker_pool *pool, struct pool_job *job)
{
	fetcher_send(container_of(pool, struct fetcher, workers), &job->message);
}

static void mirror_finished(struct worker_pool *pool, struct pool_job *job)
{
	fetcher_send(container_of(pool, struct fetcher, mirror_workers), &job->message);
}

static void cache_finished(struct worker_pool *pool, struct pool_job *job)
{
	fetcher_send(container_of(pool, struct fetcher, cache_workers), &job->message);
}

void fetcher_cache_submit(struct fetcher *fetcher, struct pool_job *job)
{
	job->message.arrive = job_arrived;
	worker_pool_submit(&fetcher->cache_workers, job);
}

void fetcher_submit(struct fetcher *fetcher, struct pool_job *job)
{
	job->message.arrive = job_arrived;
	worker_pool_submit(&fetcher->workers, job);
}

static void mirror_job_arrived(struct fetcher *fetcher, struct fetcher_message *message)
{
	fetcher->mirror_jobs--;
	job_arrived(fetcher, message);
}

void fetcher_mirror_submit(struct fetcher *fetcher, struct pool_job *job)
{
	job->message.arrive = mirror_job_arrived;
	fetcher->mirror_jobs++;
	worker_pool_submit(&fetcher->mirror_workers, job);
}

bool fetcher_mirror_cancel(struct fetcher *fetcher, struct pool_job *job)
{
	bool back = worker_pool_cancel(&fetcher->mirror_workers, job);

	fetcher->mirror_jobs -= back;
	return back;
}

static int init_loop(struct fetcher *fetcher)
{
	int err = uv_loop_init(&fetcher->loop);

	if (err)
		return err;
	fetcher->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	if (fetcher->wake_fd < 0)
		return -errno;
	fetcher->wake.data = fetcher;
	fetcher->before_wait.data = fetcher;
	err = uv_poll_init(&fetcher->loop, &fetcher->wake, fetcher->wake_fd);
	if (!err)
		err = uv_poll_start(&fetcher->wake, UV_READABLE, on_wake);
	if (!err)
		err = uv_prepare_init(&fetcher->loop, &fetcher->before_wait);
	if (!err)
		err = timer_queue_init(&fetcher->timers, &fetcher->loop);
	return err;
}

static unsigned count_cpus(void)
{
	cpu_set_t cpus;

	return sched_getaffinity(0, sizeof(cpus), &cpus) ? 1 : (unsigned)CPU_COUNT(&cpus);
}

static void set_options(struct fetcher *fetcher, const struct fetcher_options *options)
{
	unsigned cpus = count_cpus();

	fetcher->options = *options;
	if (!fetcher->options.workers)
		fetcher->options.workers = cpus < WORKERS_MIN ? WORKERS_MIN :
					   cpus > WORKERS_MAX ? WORKERS_MAX :
								cpus;
	if (!fetcher->options.max_transfers)
		fetcher->options.max_transfers = TRANSFERS_DEFAULT;
	if (!fetcher->options.max_buffer_bytes)
		fetcher->options.max_buffer_bytes = BUFFER_DEFAULT_BYTES;
}

static void init_lists(struct fetcher *fetcher)
{
	for (unsigned i = 0; i < UNIT_BUCKETS; i++)
		list_init(&fetcher->buckets[i]);
	list_init(&fetcher->demand);
	list_init(&fetcher->prefetch);
	list_init(&fetcher->unstored);
	list_init(&fetcher->kept);
	list_init(&fetcher->reads);
}

static int start_threads(struct fetcher *fetcher)
{
	int err = lazy_small_stacks();

	fetcher->workers.finished = own_finished;
	fetcher->workers.name = "fetch-worker";
	fetcher->workers.role = CONFINE_FETCH;
	fetcher->workers.max_per_place = fetcher->options.workers;
	fetcher->workers.spare = WORKERS_SPARE;
	fetcher->mirror_workers.finished = mirror_finished;
	fetcher->mirror_workers.name = "mirror-worker";
	fetcher->mirror_workers.role = CONFINE_HELPERS;
	fetcher->mirror_workers.max_per_place = MIRROR_WORKERS_PER_PLACE;
	fetcher->mirror_workers.spare = MIRROR_WORKERS_SPARE;
	fetcher->cache_workers.finished = cache_finished;
	fetcher->cache_workers.name = "cache-worker";
	fetcher->cache_workers.role = CONFINE_FETCH;
	fetcher->cache_workers.max_per_place = 1;
	if (!err)
		err = worker_pool_start(&fetcher->workers,
					fetcher->options.workers + WORKERS_SPARE);
	if (!err)
		err = worker_pool_start(&fetcher->mirror_workers, MIRROR_WORKERS);
	if (!err && fetcher->cache)
		err = worker_pool_start(&fetcher->cache_workers, CACHE_WORKERS);
	if (!err)
		err = -pthread_create(&fetcher->thread, NULL, fetcher_main, fetcher);
	return err;
}

static void free_all(struct fetcher *fetcher)
{
	worker_pool_stop(&fetcher->workers);
	worker_pool_stop(&fetcher->mirror_workers);
	worker_pool_stop(&fetcher->cache_workers);
	receive_messages(fetcher); /* the workers' last messages */
	if (uv_loop_close(&fetcher->loop))
		msg_debug("a kind of mirror has not closed its handles in the fetcher's loop");
	close(fetcher->wake_fd);
	breakers_free(fetcher->breakers);
	latencies_free(fetcher->latencies);
	prefetch_run_deinit(fetcher);
	EVP_MD_free(fetcher->sha256);
	free(fetcher);
}

int fetcher_start(const struct fetcher_options *options, struct store *store, struct cache *cache,
		  struct fetcher **fetcher)
{
	struct fetcher *made = calloc(1, sizeof(*made));
	int err;

	if (!made)
		return -ENOMEM;
	made->store = store;
	made->cache = cache;
	set_options(made, options);
	init_lists(made);
	prefetch_run_init(made);
	err = init_loop(made);
	if (err) {
		free(made);
		return err;
	}
	/* Fetched once, because EVP_sha256() would look it up each time, under a lock. */
	made->sha256 = EVP_MD_fetch(NULL, "SHA256", NULL);
	err = made->sha256 ? start_threads(made) : -ENOMEM;
	if (!err) {
		*fetcher = made;
		return 0;
	}
	/* No thread runs the loop now, so run it here to close its handles. */
	try_to_end(&made->before_wait);
	uv_run(&made->loop, UV_RUN_DEFAULT);
	free_all(made);
	return err;
}

void fetcher_abandon(struct fetcher *fetcher)
{
	relaxed_store(&fetcher->abandoned, true);
	wake_up(fetcher);
}

int fetcher_stop(struct fetcher *fetcher)
{
	struct timespec until;

	relaxed_store(&fetcher->abandoned, true);
	__atomic_store_n(&fetcher->stopping, true, __ATOMIC_RELEASE);
	wake_up(fetcher);
	clock_gettime(CLOCK_REALTIME, &until);
	until.tv_sec += STOP_WAIT_S;
	if (pthread_timedjoin_np(fetcher->thread, NULL, &until)) {
		/* Whoever has answered to readers may be closed. */
		(void)__atomic_load_n(&fetcher->ending, __ATOMIC_ACQUIRE);
		return -ETIMEDOUT;
	}
	free_all(fetcher);
	return 0;
}

static void read_arrived(struct fetcher *fetcher, struct fetcher_message *message)
{
	read_begin(fetcher, container_of(message, struct lazy_read, message));
}

void fetcher_read(struct fetcher *fetcher, struct lazy_read *read)
{
	read->message.arrive = read_arrived;
	fetcher_send(fetcher, &read->message);
}

static void prefetch_arrived(struct fetcher *fetcher, struct fetcher_message *message)
{
	struct prefetch *prefetch = container_of(message, struct prefetch, message);

	if (!relaxed_load(&fetcher->abandoned)) {
		for (uint64_t unit = prefetch->first; unit <= prefetch->last; unit++)
			unit_get(fetcher, prefetch->source, unit, false);
		units_admit(fetcher);
	}
	free(prefetch);
}

void fetcher_prefetch(struct fetcher *fetcher, struct source *source, uint64_t offset,
		      uint64_t length)
{
	struct prefetch *prefetch;

	if (offset >= source->size || !length)
		return;
	if (length > source->size - offset)
		length = source->size - offset;
	prefetch = calloc(1, sizeof(*prefetch));
	if (!prefetch)
		return;
	prefetch->source = source;
	prefetch->first = unit_of(source, offset);
	prefetch->last = unit_of(source, offset + length - 1);
	prefetch->message.arrive = prefetch_arrived;
	fetcher_send(fetcher, &prefetch->message);
}

struct uv_loop_s *fetcher_loop(struct fetcher *fetcher)
{
	return &fetcher->loop;
}

void fetcher_attach(struct fetcher *fetcher, struct fetcher_attachment *attachment)
{
	attachment->next = fetcher->attachments;
	fetcher->attachments = attachment;
}

struct fetcher_attachment *fetcher_attached(const struct fetcher *fetcher, const void *key)
{
	struct fetcher_attachment *attachment = fetcher->attachments;

	while (attachment && attachment->key != key)
		attachment = attachment->next;
	return attachment;
}
