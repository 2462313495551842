/* SPDX-License-Identifier: MIT */
/* Internals of the fetcher: units in flight. Everything here belongs to the fetcher's thread. */
#ifndef LAZY_UNIT_H
#define LAZY_UNIT_H

#include <openssl/types.h>
#include <pthread.h>
#include <stdbool.h>
#include <uv.h>

#include "base/list.h"
#include "lazy/event.h"
#include "lazy/fetcher.h"
#include "lazy/prefetch.h"
#include "lazy/worker_pool.h"

enum {
	UNIT_BUCKETS = 1024, /* a power of two */
	/* these threads mostly wait: for disks, and for servers of network file systems */
	MIRROR_WORKERS = 8,
	MIRROR_WORKERS_PER_PLACE =
		3,		  /* so that a file system that hangs does not get all of them */
	MIRROR_WORKERS_SPARE = 2, /* left for credentials, whatever hangs */
	CACHE_WORKERS = 3,	  /* one of them puts units in */
	/* of one mirror for one unit, after which the unit does not ask it again */
	WRONG_ANSWERS_MAX = 3,
};

enum unit_state {
	UNIT_NEW,      /* in no queue yet */
	UNIT_QUEUED,   /* waits for a slot */
	UNIT_RESTING,  /* waits until it is queued again (timer), without a slot */
	UNIT_LOOKING,  /* a worker looks it up in the cache; waits for that, until its timer */
	UNIT_FETCHING, /* a mirror is being asked */
	UNIT_CHECKING, /* a worker verifies it */
	/* All of these are right and have been delivered. */
	UNIT_UNSTORED, /* is to be put in the cache; may be dropped from memory before that */
	UNIT_STORING,  /* a worker puts it in the cache */
	UNIT_KEPT,     /* not in the cache; stays in memory until that is needed */
};

struct look_up;

/* What a worker found out about a unit. */
struct unit_check {
	int err; /* 0; -EBADMSG: the content is wrong; -ESTALE: the identity is; else the check failed */
	int disk_err; /* the map could not be read or written; a negative errno */
	bool known;   /* it was checked against a digest */
	bool pinned;
	bool found; /* the cache had it */
};

struct unit {
	struct fetcher *fetcher;
	struct source *source;
	uint64_t number;
	uint32_t length; /* bytes */
	enum unit_state state;
	bool demanded;	      /* a reader has waited for it */
	uint64_t prefetch_id; /* of the prefetch in fetcher->run that waits for it; 0: none does */
	uint8_t *data;	      /* NULL while NEW, QUEUED or RESTING */
	struct link waiters;
	struct link in_bucket;
	struct link in_queue;	 /* QUEUED; UNSTORED, KEPT: the oldest first */
	struct look_up *look_up; /* LOOKING: what it waits for */

	struct pool_job job;
	struct unit_check check;

	/* Attempts. */
	struct fetch fetch;
	/*
	 * RESTING: when it ends. LOOKING: when it goes on without. FETCHING: when to check for
	 * progress; see unit_joined()
	 */
	struct timer timer;
	unsigned progress; /* of the fetch, when the timer was set */
	uint64_t began_ns; /* the last attempt */
	unsigned rounds;
	bool cut;     /* an attempt got no complete response; see struct fetch */
	bool waited;  /* it has waited once for an open breaker */
	uint16_t out; /* bit set: mirrors that this unit does not ask again */
	uint8_t tries[SOURCE_MIRRORS_MAX];
	uint8_t wrong[SOURCE_MIRRORS_MAX];
};

/* One read that waits for one unit. */
struct waiter {
	struct link link; /* in unit->waiters */
	struct waiter *next_of_read;
	struct lazy_read *read;
	struct unit *unit;
};

/* See base/relaxed.h. */
struct fetch_counts {
	uint64_t reads, read_errors, deadlines_missed;
	uint64_t units_fetched, bytes_fetched, units_prefetched, units_from_cache;
	uint64_t units_verified, units_pinned; /* checked against a known digest; against none */
	/* Put in the cache; not put in, because of an error; because the cache was too slow. */
	uint64_t units_stored, store_failures, store_drops;
	uint64_t attempts, retries, wrong_digests;
	uint64_t failures[FETCH_WRONG + 1]; /* by enum fetch_failure */
	uint64_t local_failures; /* failures that are no mirror's: of the map's file, or memory */
	/* The current state. */
	uint64_t reads_waiting, units_queued, units_in_flight, buffer_bytes;
	uint64_t
		unstored_bytes; /* of units that are to be put in the cache; part of `buffer_bytes` */
};

/*
 * The error of the last write to the map or the cache; 0 again when one succeeds. See
 * base/relaxed.h.
 */
struct disk_error {
	int64_t err; /* 0, or a negative errno */
	uint64_t at_ns;
};

enum { DISK_OF_MAP, DISK_OF_CACHE, DISKS };

struct fetcher {
	struct fetcher_options options;
	struct store *store;
	struct cache *cache;
	EVP_MD *sha256;

	uv_loop_t loop;
	int wake_fd; /* eventfd */
	uv_poll_t wake;
	uv_prepare_t before_wait; /* runs while the fetcher is ending */
	struct timer_queue timers;
	pthread_t thread;
	struct message_queue messages;
	struct worker_pool workers; /* for the fetcher's own jobs */
	/* for mirrors; they may hang with a file system that does not answer */
	struct worker_pool mirror_workers;
	struct worker_pool cache_workers; /* they may hang with the cache's disk, or its lock */
	bool stopping;			  /* atomic */
	bool abandoned;			  /* atomic */
	bool ending;			  /* atomic: the thread has seen `stopping` */
	struct fetcher_attachment *attachments;

	struct link buckets[UNIT_BUCKETS];
	struct link demand, prefetch; /* units that wait for a slot */
	struct link unstored, kept;   /* units that may be evicted from memory */
	struct link reads;	      /* all reads that wait */
	struct prefetch_run run;
	unsigned busy;	      /* units with something in progress */
	unsigned prefetching; /* how many of them no reader has asked for */
	unsigned storing;
	uint64_t storing_bytes;
	unsigned look_ups;	 /* jobs; some are of units that have gone on without */
	bool cache_is_late;	 /* units do not wait for it, until a look-up has ended */
	uint64_t flush_until_ns; /* when `ending`: no unit is put in the cache after that */
	/* jobs of mirror_workers; some belong to fetches that were given up */
	unsigned mirror_jobs;
	bool admitting;		   /* units_admit() is running */
	struct breaker *breakers;  /* atomic */
	struct latency *latencies; /* atomic */
	struct fetch_counts counts;
	struct disk_error disks[DISKS];
	uint64_t log_second;
	unsigned logged; /* lines logged in that second */
};

void fetcher_send(struct fetcher *fetcher, struct fetcher_message *message);
/* Submits a job to the fetcher's own workers. */
void fetcher_submit(struct fetcher *fetcher, struct pool_job *job);
void fetcher_cache_submit(struct fetcher *fetcher, struct pool_job *job);
/* The name that statistics and the log use. */
const char *fetch_failure_name(enum fetch_failure failure);

/* read.c */

void read_begin(struct fetcher *fetcher, struct lazy_read *read);
/* Delivers the unit's verified data to its readers. */
void unit_deliver(struct unit *unit);
/* Fails readers that have a deadline with `err`. Returns whether any reader still waits. */
bool unit_fail_waiters(struct unit *unit, int err);
/* The latest deadline of its readers: FETCHER_NO_DEADLINE if one has none, 0 if nobody waits. */
uint64_t unit_last_deadline_ns(const struct unit *unit);
void reads_fail_all(struct fetcher *fetcher, int err);

/* units.c */

/* Returns the unit in flight, or NULL. */
struct unit *unit_find(struct fetcher *fetcher, const struct source *source, uint64_t number);
/* Returns the unit in flight, or a new one that waits for a slot; NULL when memory is short. */
struct unit *unit_get(struct fetcher *fetcher, struct source *source, uint64_t number,
		      bool demanded);
/* Give slots to units that wait for one. */
void units_admit(struct fetcher *fetcher);
void unit_set_state(struct unit *unit, enum unit_state state);
static inline bool unit_is_right(const struct unit *unit)
{
	return unit->state >= UNIT_UNSTORED;
}
/* Gives its slot to others until `at_ns`. Then it is queued again, before units that came later. */
void unit_rest(struct unit *unit, uint64_t at_ns);
/* Gives its slot to others until there is one for it, and its host can take one more. */
void unit_queue(struct unit *unit);
/*
 * To be called when nobody waits for it any more: frees it if nothing is in progress. This admits no
 * other unit, because its caller is ending a read, and a unit that is admitted may end reads too.
 */
void unit_left_alone(struct unit *unit);
/* Its data are verified. `from_mirror`: they are not in the cache yet. */
void unit_ready(struct unit *unit, bool from_mirror);
/* Keeps its data in memory until others need it. */
void unit_keep(struct unit *unit);
/* Frees a unit that nobody waits for and that has nothing in progress. Others get its slot. */
void unit_end(struct unit *unit);
/* Ends all units that can end now. */
void units_stop(struct fetcher *fetcher);

/* choice.c */

/*
 * Chooses the mirror that was tried least, where an unhealthy one counts as tried once more; of
 * equals, the first. Returns NULL when none can be asked now; `*at_ns` is when one can (UINT64_MAX:
 * unknown).
 */
struct mirror *mirror_choose(struct unit *unit, uint64_t now_ns, uint64_t *at_ns);
/* Whether another mirror than that may be of use. */
bool mirror_has_other(const struct unit *unit, const struct mirror *mirror, uint64_t now_ns);
/* Whether there is no reason to wait: another mirror was tried less often, or none is left. */
bool mirrors_go_on(const struct unit *unit, unsigned tries, uint64_t now_ns);
/* Whether its host already has as many fetches as it may have. */
bool mirror_is_full(const struct unit *unit, const struct mirror *mirror);
/* The same for the mirror that would be asked next. */
bool unit_host_is_full(struct unit *unit);

/* attempt.c */

/* Asks a mirror, now or when one can be asked again, or fails. */
void unit_fetch(struct unit *unit);
/*
 * To be called before a reader is added that waits until `deadline_ns`: the running attempt may
 * have begun for nobody.
 */
void unit_joined(struct unit *unit, uint64_t deadline_ns);
/* To be called for the first reader: from now on, its attempt counts as demanded. */
void unit_demanded(struct unit *unit);
/* Handles wrong content; unit->check.err says what is wrong. */
void unit_refuse(struct unit *unit);
/* Handles right content. */
void unit_accept(struct unit *unit);

/*
 * fetchstats.c: records the result of the last write, 0 or a negative errno, for
 * fetcher_stats_json().
 */
void disk_note(struct fetcher *fetcher, unsigned disk, int err);

/* verify.c: each has a worker do the job, and continues when that is done. */

void unit_verify(struct unit *unit);
/* To be called while the unit is being fetched: loads the digest to verify it against. */
void unit_expect(const struct unit *unit);

/* caching.c */

/*
 * Looks the unit up in the cache, and continues when that is done, or takes too long. Returns false
 * at once when the cache cannot have the unit, or is known to be slow.
 */
bool unit_look_up(struct unit *unit);
/* Queues the unit for the cache. Returns false when there is no cache for it. */
bool unit_store(struct unit *unit);
/* Has workers put queued units in the cache, as many as may be at a time. */
void units_put_some(struct fetcher *fetcher);
/*
 * The unit to be dropped from the queue when its memory is needed, or NULL. `prefetched`: if there
 * is no other, one that a prefetch wants.
 */
struct unit *unit_to_drop(struct fetcher *fetcher, bool prefetched);
/* To be called when the fetcher ends: what is queued then is put in for a short time. */
void units_flush(struct fetcher *fetcher);

#endif
