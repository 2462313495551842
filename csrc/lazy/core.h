/* SPDX-License-Identifier: MIT */
/*
 * The core of the fetcher: units that are wanted, and what is done to get them. Everything here
 * belongs to the fetcher's thread, or for a moment to a reader's (fetcher_ops.h); exceptions say so.
 * Producers enqueue completions. core_step() and core_visit() take them, begin runs and free unused
 * units; nothing else does, so an object that a function holds stays valid. Files call those that come
 * before them below.
 */
#pragma once

#include <openssl/types.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/completion.h"
#include "base/list.h"
#include "base/worker_pool.h"
#include "content/source.h"
#include "fetch/event.h"
#include "fetch/host.h"
#include "fetch/timer_queue.h"

#define FETCHER_NO_DEADLINE UINT64_MAX

enum {
	UNIT_BUCKETS = 4096, /* units of 4 KiB that memory has room for are 6,144 */
	/* SHA-256 of so much takes no longer than waking a worker and being woken by it. */
	HASH_AT_ONCE_BYTES = 16 << 10,
	/* A single unit in flight may be larger: nothing else waits for the thread meanwhile. */
	HASH_ALONE_BYTES = 256 << 10,
	/* of one mirror for one unit, after which the unit does not ask it again */
	WRONG_ANSWERS_MAX = 3,
	/* More units than requests of a device that wait at once, mostly. */
	MISSED_MAX = 256,
};

enum unit_state {
	UNIT_WANTED,   /* waits in a queue, if anybody wants it */
	UNIT_RESTING,  /* waits until it is queued again (timer) */
	UNIT_LOOKING,  /* a worker looks it up in the cache; waits for that, until its timer */
	UNIT_ASKED,    /* a mirror was asked for it; those before it come first */
	UNIT_FETCHING, /* it arrives, or is whole (then its run is NULL) */
	UNIT_CHECKING, /* a worker verifies it */
	UNIT_VERIFIED, /* its data are verified */
};

/* What is known about the cache and a unit that is right. */
enum unit_fate {
	FATE_OPEN,  /* it is being put in, or waits for that */
	FATE_FOUND, /* the cache had it */
	FATE_STORED,
	FATE_LOST, /* the cache does not get it */
};

struct core;
struct subscription;
struct unit;

struct subscription_ops {
	/*
	 * Each subscription ends with one call of one of these. They may end other subscriptions,
	 * put completions and set timers, and free the subscription; no more.
	 */
	void (*right)(struct subscription *subscription, const struct unit *unit);
	void (*failed)(struct subscription *subscription, int err);
	bool until_stored; /* right() is called when the fate is known */
	enum urgency urgency;
	unsigned
		rounds; /* how often the unit is tried again while no other subscription wants it */
};

/* Somebody who wants one unit. It stays where it is until a callback or subscription_end(). */
struct subscription {
	const struct subscription_ops *ops;
	uint64_t deadline_ns; /* of a reader; 0: it is none */
	/* The core's own. */
	struct link link; /* in unit->subscriptions, or on its way to a callback */
	struct unit *unit;
};

/* What a worker found out about a unit. */
struct unit_check {
	int err; /* 0; -EBADMSG: the content is wrong; -ESTALE: the identity is; else the check failed */
	int disk_err; /* the map could not be read or written; a negative errno */
	bool known;   /* it was checked against a digest */
	bool pinned;
	bool hashed; /* `digest` is that of its data */
	uint8_t digest[SOURCE_DIGEST_BYTES];
};

struct look_up;
struct run;

/* A unit in flight, or kept in memory. free_unused() frees it. */
struct unit {
	struct core *core;
	struct source *source;
	uint64_t number;
	uint32_t length; /* bytes */
	enum unit_state state;
	enum unit_fate fate;
	enum urgency urgency; /* the highest of its subscriptions since it was queued */
	unsigned holds;	      /* of the cache's queue, of the units that are kept */
	bool reserved;	      /* its length counts in `buffer_bytes` */
	uint8_t *data;
	struct link subscriptions;
	struct subscription ahead; /* of a read-ahead, which nobody waits for */
	struct link in_bucket;
	struct link in_queue;	 /* of its host; RIGHT: of the cache, or of those that are kept */
	struct link in_unused;	 /* perhaps nobody needs it */
	struct completion news;	 /* of its state: a change of the state takes them back */
	struct host *host;	 /* WANTED: in whose queue it is */
	struct look_up *look_up; /* LOOKING: what it waits for */

	struct pool_job job;
	struct unit_check check;

	/* Attempts. */
	struct run *run;       /* ASKED, FETCHING: the request that it is part of */
	struct mirror *mirror; /* the last one that was asked */
	char *identity;	       /* of that one's object: to be pinned with this content; or NULL */
	struct timer timer;    /* RESTING: when it ends. LOOKING: when it goes on without */
	uint64_t began_ns;     /* the last attempt */
	uint64_t later_ns;     /* when a cache has first said that it will have it later; 0: none */
	unsigned rounds;
	bool cut;     /* an attempt got no complete response; see struct run */
	bool waited;  /* it has waited once for an open breaker */
	uint32_t out; /* bit set: mirrors that this unit does not ask again */
	/* NB: a reader without a deadline may wait for days, and one that is 0 again comes first. */
	uint32_t tries[SOURCE_PLACES_MAX];
	uint8_t wrong[SOURCE_PLACES_MAX];
};

struct core_options {
	unsigned max_transfers;	   /* most units in flight */
	uint64_t max_buffer_bytes; /* most memory for units */
	uint64_t run_bytes;	   /* most bytes of a request; 0: see host_run_bytes() */
	unsigned changed_ms;	   /* how long a mirror that has changed is not asked */
	unsigned unhealthy_ms;	   /* how long other mirrors are preferred to one that fails */
	unsigned silent_ms;	   /* how long requests may be silent; 0: see run.c */
};

/* See base/relaxed.h. */
struct fetch_counts {
	uint64_t reads, read_errors, deadlines_missed;
	uint64_t failed_source; /* of the last read that failed; 0: none has */
	uint64_t units_fetched, bytes_fetched, units_prefetched, units_from_cache;
	uint64_t coded_bytes_fetched;	       /* of compressed objects, as they came */
	uint64_t units_verified, units_pinned; /* checked against a known digest; against none */
	/* Put in the cache; not put in, because of an error; because the cache was too slow. */
	uint64_t units_stored, store_failures, store_drops;
	uint64_t attempts, retries, wrong_digests;
	uint64_t whole_answers;		    /* to requests for a range */
	uint64_t whole_units;		    /* that came with them, and nobody waited for */
	uint64_t failures[FETCH_WRONG + 1]; /* by enum fetch_failure */
	uint64_t local_failures; /* failures that are no mirror's: of the map's file, or memory */
	/* The current state. */
	uint64_t reads_waiting, units_queued, units_in_flight, buffer_bytes;
	uint64_t
		unstored_bytes; /* of units that wait to be put in the cache; part of `buffer_bytes` */
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

/* A unit whose read has just timed out. */
struct missed {
	const struct source *source;
	uint64_t number;
	uint64_t until_ns;
};

struct core {
	struct core_options options;
	struct fetcher *fetcher; /* only handed on to mirrors */
	bool visited;		 /* see fetcher_ops.h */
	struct store *store;	 /* NULL: nothing is pinned */
	struct cache *cache;	 /* NULL: without one */
	EVP_MD *sha256;
	EVP_MD_CTX *hash; /* of the fetcher's thread */
	struct timer_queue timers;
	struct message_queue messages; /* any thread; see core_send() */
	int wake_fd;		       /* eventfd */
	struct worker_pool workers;
	struct worker_pool cache_workers; /* they may hang with the cache's disk, or its lock */
	struct worker_pool putters;	  /* the same: one that puts units in; others come first */

	/* What the step does with news of units and runs. */
	void (*take_unit)(struct core *core, struct completion *news);
	void (*take_run)(struct core *core, struct completion *news);
	struct link completions;
	struct link unused;	      /* units that perhaps nobody needs */
	struct link ready[URGENCIES]; /* hosts that have work, and perhaps may begin it */
	struct host *hosts;	      /* atomic */
	struct latency *latencies;    /* atomic */
	struct host lookup_queue;     /* of units that wait for a look-up in the cache */
	struct host no_host;	      /* of mirrors that have no host, and units without a mirror */
	struct link buckets[UNIT_BUCKETS];
	unsigned units;
	unsigned busy;	       /* units with something in progress */
	unsigned prefetching;  /* how many of them no reader has asked for */
	uint64_t asked_bytes;  /* of units that are ASKED */
	struct link paused;    /* runs that wait for memory */
	struct link unstarted; /* runs that only the fetcher's own thread may start */
	struct link kept;      /* right, not in the cache; in memory until that is needed */
	struct link unstored;  /* right, and to be put in the cache: the oldest first */
	struct link storing;   /* those that a worker is putting in */
	uint64_t storing_bytes;
	struct pool_job put_job;
	struct timer put_timer; /* when `unstored` are put in, if they remain few */
	bool put_now;
	struct link spare; /* memory of units that are gone */
	uint64_t spare_bytes;
	struct timer spare_timer; /* when that is given back */
	unsigned look_ups;	  /* jobs; some are of units that have gone on without */
	bool cache_is_late;	  /* units do not wait for it, until a look-up has ended */
	bool abandoned;		  /* atomic: reads fail */
	bool ending;		  /* atomic: nothing begins any more */
	uint64_t flush_until_ns;  /* when `ending`: no unit is put in the cache after that */
	struct link reads;	  /* all reads that wait */
	struct missed missed[MISSED_MAX]; /* a ring, which missed.c explains */
	unsigned missed_next;
	uint64_t missed_until_ns; /* of the newest */
	struct fetch_counts counts;
	struct disk_error disks[DISKS];
};

/* core.c */

/* Has it taken by the next step. Does nothing when it is queued already. */
void completion_put(struct core *core, struct completion *completion);
/* The same from any thread. */
void core_send(struct core *core, struct completion *completion);
/* Moves what was sent into the queue. */
void core_receive(struct core *core);
/* Submits a job to some of the core's workers. */
void core_submit(struct worker_pool *pool, struct pool_job *job);
/* How many fetches a host may have for such units, if it does not fail. */
uint64_t core_slots(const struct core *core, const struct source *source);

/* fetchstats.c */

/* Returns the counters as a new reference, or NULL. Any thread may call this. */
json_t *fetchstats_json(struct core *core);
/* Records the result of the last write, 0 or a negative errno. */
void disk_note(struct core *core, unsigned disk, int err);
/* The name that statistics and the log use. */
const char *fetch_failure_name(enum fetch_failure failure);

/* units.c */

/* Returns the unit, or NULL. */
struct unit *unit_find(struct core *core, const struct source *source, uint64_t number);
/* The same, and makes it if there is none. NULL: memory is short. */
struct unit *unit_get(struct core *core, struct source *source, uint64_t number);
void unit_set(struct unit *unit, enum unit_state state);
/* Whether something is in progress. */
bool unit_is_busy(enum unit_state state);
/* To be called when it may not be needed any more. */
void unit_let_go(struct unit *unit);
/* Calls the subscribers of one that is verified. */
void unit_deliver(struct unit *unit);
/* The highest urgency of its subscriptions. */
enum urgency unit_urgency(const struct unit *unit);
/* The first subscription of a reader, or NULL. */
struct subscription *unit_reader(const struct unit *unit);
/* The latest deadline of its readers: FETCHER_NO_DEADLINE if one has none, 0 without readers. */
uint64_t unit_last_deadline_ns(const struct unit *unit);
/* Has all mirrors asked again. */
void unit_forget_attempts(struct unit *unit);
/*
 * Fails its subscriptions, but for readers without a deadline. Returns whether any is left; else
 * the unit is as if it had never been tried, and waits for somebody who wants it.
 */
bool unit_fail(struct unit *unit, int err);
/* Enters the queue of a host; `first`: before all others. */
void unit_queue(struct unit *unit, struct host *host, bool first);
void unit_rest(struct unit *unit, uint64_t at_ns);
/* Returns memory for its data, or NULL. */
uint8_t *unit_new_data(const struct unit *unit);
void unit_free_data(struct unit *unit);
/* Gives memory back that is kept for the next ones. */
void units_free_spare(struct core *core);
/* Gives it memory, which may be there only later (NULL). */
void unit_reserve(struct unit *unit, uint8_t *data);
/* Rests or fails, because there is no memory. */
void unit_has_no_memory(struct unit *unit);
/* Gives it memory now. Returns false when there is none, and the unit rests or has failed. */
bool unit_allocate(struct unit *unit);
/* Says what the cache has made of it. */
void unit_set_fate(struct unit *unit, enum unit_fate fate);
/* Keeps its data in memory until others need it. */
void unit_keep(struct unit *unit);
/* Gives the memory of a unit that is right to others. */
void unit_forget(struct unit *unit);
/* To be called when a host may be able to begin one more fetch. */
void host_is_ready(struct core *core, struct host *host);

/* missed.c */

/* A read that began at `since_ns` missed its deadline. */
void missed_add(struct core *core, const struct source *source, uint64_t number, uint64_t since_ns);
/* Whether a read of it fails at once. */
bool missed_is_recent(struct core *core, const struct source *source, uint64_t number,
		      uint64_t now_ns);
/* The unit has come, so that reads of it no longer fail at once. */
void missed_forget(const struct unit *unit);

/* choice.c */

/*
 * Chooses the mirror that was tried least, where an unhealthy one counts as tried once more; of
 * equals, the first, and two of the caches in front of it before it. Returns NULL when none can be
 * asked now; `*at_ns` is when one can (UINT64_MAX: unknown).
 */
struct mirror *mirror_choose(struct unit *unit, uint64_t now_ns, uint64_t *at_ns);
/* Whether another mirror than that may be of use. */
bool mirror_has_other(const struct unit *unit, const struct mirror *mirror, uint64_t now_ns);
/* Has all units choose again that wait for a host, because it is worse than it was. */
void units_choose_again(struct core *core, struct host *host);
/* Chooses a mirror, and enters the queue of its host. `first`: or rests, or fails. */
void unit_choose(struct unit *unit, bool first);
/*
 * For the first in the queue of its host. Returns the mirror to ask, or NULL: it waits elsewhere,
 * rests or has failed.
 */
struct mirror *unit_take_turn(struct unit *unit, uint64_t now_ns);
/* A unit has failed at its mirror: it rests until it is tried again, or fails. */
void unit_retry(struct unit *unit);
/* Fails readers; those without a deadline go on waiting, as if the unit had not been tried. */
void unit_give_up(struct unit *unit, uint64_t now_ns, const char *why);
/* Some of that time at random, so that units that failed together do not retry together. */
uint64_t jitter_ns(uint64_t most_ms);
/* Logs an event of a unit. Of mirror and reason, each may be NULL. */
void unit_log(const struct unit *unit, const char *name, const struct mirror *mirror,
	      const char *reason, const char *text);

/* caching.c */

/* Has the cache, or a mirror, asked for it; `first`: before others that wait. */
void unit_want(struct unit *unit, bool first);
/* Looks the unit up in the cache, and continues when that is done, or takes too long. */
void unit_look_up(struct unit *unit);
/* The time for that is over. */
void unit_look_up_is_late(struct unit *unit);
/* Its data are verified. `found`: in the cache. */
void unit_verified(struct unit *unit, bool found);
/* Makes room for a unit that shall begin. Returns false when others need the memory. */
bool unit_make_room(struct unit *unit);
/* What is queued when the fetcher ends is put in for a short time. */
void units_flush(struct core *core);

/* verify.c: has a worker do it where that takes long. */

/* Returns whether unit->check says at once what came out; else the unit will have news. */
bool unit_verify(struct unit *unit);
/* To be called while the unit is being fetched: loads the digest to verify it against. */
void unit_expect(const struct unit *unit);

/* run.c: see run.h. */

/* attempt.c */

/* Asks a mirror, rests or fails. It was the first in the queue of its host. */
void unit_begin(struct unit *unit);
/* A run is over: what it lacks is tried again, rests or fails. Frees it. */
void attempt_over(struct run *run);
/* A unit was checked: unit->check says with what result. */
void unit_checked(struct unit *unit);

/* subscription.c */

/* Returns 0, or -ENOMEM. `subscription` has its ops and its deadline. */
int subscribe(struct core *core, struct subscription *subscription, struct source *source,
	      uint64_t number);
/* Does nothing when it is over. No callback is called any more. */
void subscription_end(struct subscription *subscription);
/* Fetches a unit that nobody waits for. */
void unit_read_ahead(struct core *core, struct source *source, uint64_t number);

/* step.c */

/* Initializes lists. The caller sets options, timers, pools and the eventfd. */
void core_init(struct core *core);
/* Frees what is left after the last step. */
void core_deinit(struct core *core);
/* Ends all that can end now, but for reads and the prefetch, which have ended. */
void core_stop(struct core *core);
/* Does a bounded part of the queued work. Returns whether work is left. */
bool core_step(struct core *core);
/*
 * The same for a reader's thread, which takes what it has put, and begins what may begin. Returns
 * whether the fetcher's own thread has to go on.
 */
bool core_visit(struct core *core);
