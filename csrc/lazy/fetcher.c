/* SPDX-License-Identifier: MIT */
/* The fetcher's threads and its loop; what is given to it, and how it ends. */
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
#include "lazy/unit.h"

enum {
	HANDS_MIN = 2,
	HANDS_MAX = 8,
	HANDS_SPARE =
		1, /* besides, when all others wait for pins: a large addition holds the map */
	/* One host may have two thirds of both (choice.c): 64 units of the default size. */
	TRANSFERS_DEFAULT = 96,
	BUFFER_DEFAULT_BYTES = 24 << 20,
	STOP_WAIT_S = 5,
};

struct prefetch {
	struct post post;
	struct source *source;
	uint64_t first, last; /* units */
};

/*
 * Any thread. Not uv_async_send(): whom it wakes has to wait for it to return, and spins where it cannot,
 * because he runs on its CPU.
 */
static void wake_up(struct fetcher *fetcher)
{
	eventfd_write(fetcher->wake_fd, 1);
}

void fetcher_post(struct fetcher *fetcher, struct post *post)
{
	if (mailbox_put(&fetcher->inbox, &post->mail))
		wake_up(fetcher);
}

static void take_inbox(struct fetcher *fetcher)
{
	struct mail *mail = mailbox_take(&fetcher->inbox);

	while (mail) {
		struct post *post = container_of(mail, struct post, mail);

		/* What arrives may be gone at once. */
		mail = mail->next;
		post->arrive(fetcher, post);
	}
}

/* Each time before the loop waits, once it is to end: whether all has ended. */
static void try_to_end(uv_prepare_t *before_wait)
{
	struct fetcher *fetcher = before_wait->data;

	if (fetcher->busy || fetcher->storing || fetcher->mirror_jobs)
		return;
	uv_close((uv_handle_t *)&fetcher->before_wait, NULL);
	uv_close((uv_handle_t *)&fetcher->wake, NULL);
	agenda_deinit(&fetcher->agenda);
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
	/* Before anything is looked at, so that what comes later wakes this again. */
	eventfd_read(fetcher->wake_fd, &unused);
	stopping = __atomic_load_n(&fetcher->stopping, __ATOMIC_ACQUIRE);
	take_inbox(fetcher);
	if (relaxed_load(&fetcher->abandoned))
		reads_fail_all(fetcher, -EIO);
	if (stopping && !fetcher->ending) {
		fetcher->ending = true;
		units_stop(fetcher);
		uv_prepare_start(&fetcher->before_wait, try_to_end);
	}
}

static void *fetcher_main(void *argument)
{
	struct fetcher *fetcher = argument;

	lazy_thread_init("fetcher");
	uv_run(&fetcher->loop, UV_RUN_DEFAULT);
	take_inbox(fetcher);
	return NULL;
}

static void job_arrived(struct fetcher *fetcher, struct post *post)
{
	struct hand_job *job = container_of(post, struct hand_job, post);

	(void)fetcher;
	job->done(job);
}

static void own_worked(struct hands *hands, struct hand_job *job)
{
	fetcher_post(container_of(hands, struct fetcher, hands), &job->post);
}

static void mirror_worked(struct hands *hands, struct hand_job *job)
{
	fetcher_post(container_of(hands, struct fetcher, mirror_hands), &job->post);
}

void fetcher_own_hand(struct fetcher *fetcher, struct hand_job *job)
{
	job->post.arrive = job_arrived;
	hands_give(&fetcher->hands, job);
}

static void mirror_job_arrived(struct fetcher *fetcher, struct post *post)
{
	fetcher->mirror_jobs--;
	job_arrived(fetcher, post);
}

void fetcher_hand(struct fetcher *fetcher, struct hand_job *job)
{
	job->post.arrive = mirror_job_arrived;
	fetcher->mirror_jobs++;
	hands_give(&fetcher->mirror_hands, job);
}

bool fetcher_hand_back(struct fetcher *fetcher, struct hand_job *job)
{
	bool back = hands_take_back(&fetcher->mirror_hands, job);

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
		err = agenda_init(&fetcher->agenda, &fetcher->loop);
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
	if (!fetcher->options.hands)
		fetcher->options.hands = cpus < HANDS_MIN ? HANDS_MIN :
					 cpus > HANDS_MAX ? HANDS_MAX :
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
	list_init(&fetcher->kept);
	list_init(&fetcher->reads);
}

static int start_threads(struct fetcher *fetcher)
{
	int err = lazy_small_stacks();

	fetcher->hands.worked = own_worked;
	fetcher->hands.name = "hand";
	fetcher->hands.most_of_place = fetcher->options.hands;
	fetcher->hands.spare = HANDS_SPARE;
	fetcher->mirror_hands.worked = mirror_worked;
	fetcher->mirror_hands.name = "mirror-hand";
	fetcher->mirror_hands.most_of_place = MIRROR_HANDS_OF_PLACE;
	fetcher->mirror_hands.spare = MIRROR_HANDS_SPARE;
	if (!err)
		err = hands_start(&fetcher->hands, fetcher->options.hands + HANDS_SPARE);
	if (!err)
		err = hands_start(&fetcher->mirror_hands, MIRROR_HANDS);
	if (!err)
		err = -pthread_create(&fetcher->thread, NULL, fetcher_main, fetcher);
	return err;
}

static void free_all(struct fetcher *fetcher)
{
	hands_stop(&fetcher->hands);
	hands_stop(&fetcher->mirror_hands);
	take_inbox(fetcher); /* what they have done last */
	if (uv_loop_close(&fetcher->loop))
		msg_debug("a kind of mirror has left something in the fetcher's loop");
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
	/* Looked up once: each EVP_sha256() is looked up anew, under a lock. */
	made->sha256 = EVP_MD_fetch(NULL, "SHA256", NULL);
	err = made->sha256 ? start_threads(made) : -ENOMEM;
	if (!err) {
		*fetcher = made;
		return 0;
	}
	/* No thread runs the loop, so it is run here, to close what is in it. */
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
	if (pthread_timedjoin_np(fetcher->thread, NULL, &until))
		return -ETIMEDOUT;
	free_all(fetcher);
	return 0;
}

static void read_arrived(struct fetcher *fetcher, struct post *post)
{
	read_begin(fetcher, container_of(post, struct lazy_read, post));
}

void fetcher_read(struct fetcher *fetcher, struct lazy_read *read)
{
	read->post.arrive = read_arrived;
	fetcher_post(fetcher, &read->post);
}

static void prefetch_arrived(struct fetcher *fetcher, struct post *post)
{
	struct prefetch *prefetch = container_of(post, struct prefetch, post);

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
	prefetch->first = offset / source->unit_bytes;
	prefetch->last = (offset + length - 1) / source->unit_bytes;
	prefetch->post.arrive = prefetch_arrived;
	fetcher_post(fetcher, &prefetch->post);
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
