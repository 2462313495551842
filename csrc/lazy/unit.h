/* SPDX-License-Identifier: MIT */
/* The fetcher's inside: what is in flight. All of it belongs to the fetcher's thread. */
#ifndef LAZY_UNIT_H
#define LAZY_UNIT_H

#include <openssl/types.h>
#include <pthread.h>
#include <stdbool.h>
#include <uv.h>

#include "base/list.h"
#include "lazy/event.h"
#include "lazy/fetcher.h"
#include "lazy/hands.h"
#include "lazy/prefetch.h"

enum {
	UNIT_BUCKETS = 1024, /* a power of two */
	MIRROR_HANDS =
		8, /* they wait most of the time: for disks, and for servers of file systems */
	MIRROR_HANDS_OF_PLACE = 3, /* a file system that hangs has no more of them */
	MIRROR_HANDS_SPARE = 2,	   /* for credentials, whatever hangs */
	WRONG_ANSWERS_MAX = 3,	   /* of one mirror for one unit, until it is of no use to it */
};

enum unit_state {
	UNIT_NEW,      /* in no queue yet */
	UNIT_QUEUED,   /* waits for room */
	UNIT_RESTING,  /* until it is queued again (alarm); takes no room meanwhile */
	UNIT_LOOKING,  /* a hand looks whether the cache has it */
	UNIT_FETCHING, /* a mirror is asked */
	UNIT_CHECKING, /* a hand verifies it */
	UNIT_STORING,  /* it is right, and given to whoever asks; a hand puts it in the cache */
	UNIT_KEPT,     /* the same, until its memory is needed */
};

/* What a hand finds out about a unit. */
struct unit_check {
	int err; /* 0; -EBADMSG: the content is wrong; -ESTALE: so is the identity; else not known */
	bool known; /* it was checked against a digest */
	bool pinned;
	bool found; /* the cache had it */
};

struct unit {
	struct fetcher *fetcher;
	struct source *source;
	uint64_t number;
	uint32_t length; /* bytes */
	enum unit_state state;
	bool demanded;	      /* somebody has waited for it */
	uint64_t prefetch_id; /* of fetcher->run, which waits for it; 0: it does not */
	uint8_t *data;	      /* NULL: NEW, QUEUED or RESTING */
	struct link waiters;
	struct link in_bucket;
	struct link in_queue; /* QUEUED; KEPT: the oldest first */

	struct hand_job job;
	struct unit_check check;

	/* Attempts. */
	struct fetch fetch;
	/* RESTING: its end. FETCHING: when to look whether something has come, see unit_joined() */
	struct alarm alarm;
	unsigned progress; /* of the fetch, when the alarm was set */
	uint64_t began_ns; /* the last attempt */
	unsigned rounds;
	bool cut;     /* an answer was; see struct fetch */
	bool waited;  /* for a host that was left alone to be tried */
	uint16_t out; /* bit set of mirrors that are of no use to this unit */
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

/* base/relaxed.h. */
struct fetch_counts {
	uint64_t reads, read_errors, deadlines_missed;
	uint64_t units_fetched, bytes_fetched, units_prefetched, units_from_cache;
	uint64_t units_verified, units_pinned; /* against a known digest; against none */
	uint64_t units_stored, store_failures; /* in the cache */
	uint64_t attempts, retries, wrong_digests;
	uint64_t failures[FETCH_WRONG + 1]; /* by enum fetch_failure */
	uint64_t local_failures;	    /* no mirror's: of the map's file, or memory */
	/* What there is now. */
	uint64_t reads_waiting, units_queued, units_in_flight, buffer_bytes;
};

struct fetcher {
	struct fetcher_options options;
	struct store *store;
	struct cache *cache;
	EVP_MD *sha256;

	uv_loop_t loop;
	int wake_fd; /* eventfd */
	uv_poll_t wake;
	uv_prepare_t before_wait; /* runs while it is ending */
	struct agenda agenda;
	pthread_t thread;
	struct mailbox inbox;
	struct hands hands;	   /* our own */
	struct hands mirror_hands; /* may hang with a file system that does not answer */
	bool stopping;		   /* atomic */
	bool abandoned;		   /* atomic */
	bool ending;		   /* the thread has seen `stopping` */
	struct fetcher_attachment *attachments;

	struct link buckets[UNIT_BUCKETS];
	struct link demand, prefetch; /* units that wait for room */
	struct link kept;	      /* units that may go */
	struct link reads;	      /* all that wait */
	struct prefetch_run run;
	unsigned busy;	      /* units with something under way */
	unsigned prefetching; /* of those, units that nobody has asked for */
	unsigned storing;
	unsigned mirror_jobs;	   /* with mirror_hands; some may be of nobody any more */
	bool admitting;		   /* in units_admit() */
	struct breaker *breakers;  /* atomic */
	struct latency *latencies; /* atomic */
	struct fetch_counts counts;
	uint64_t log_second;
	unsigned logged; /* lines in that second */
};

void fetcher_post(struct fetcher *fetcher, struct post *post);
/* On our own hands. */
void fetcher_own_hand(struct fetcher *fetcher, struct hand_job *job);
/* As statistics and the log have it. */
const char *fetch_failure_name(enum fetch_failure failure);

/* read.c */

void read_begin(struct fetcher *fetcher, struct lazy_read *read);
/* The unit's data are right. */
void unit_deliver(struct unit *unit);
/* Those who have a deadline get `err` now. Returns whether somebody still waits. */
bool unit_fail_waiters(struct unit *unit, int err);
/* Of those who wait; FETCHER_NO_DEADLINE where one has none, 0 where nobody waits. */
uint64_t unit_last_deadline_ns(const struct unit *unit);
void reads_fail_all(struct fetcher *fetcher, int err);

/* units.c */

/* The one in flight, or a new one that waits for room; NULL when memory is short. */
struct unit *unit_get(struct fetcher *fetcher, struct source *source, uint64_t number,
		      bool demanded);
/* Give room to units that wait for it. */
void units_admit(struct fetcher *fetcher);
void unit_set_state(struct unit *unit, enum unit_state state);
static inline bool unit_is_right(const struct unit *unit)
{
	return unit->state == UNIT_STORING || unit->state == UNIT_KEPT;
}
/* Gives its room to others until `at_ns`; then it waits for some again, before those that came later. */
void unit_rest(struct unit *unit, uint64_t at_ns);
/* The same, until there is room for it and its host can take one more. */
void unit_queue(struct unit *unit);
/* Nobody waits for it any more. */
void unit_left_alone(struct unit *unit);
/* Its data are right; `from_mirror`: the cache does not have them yet. */
void unit_ready(struct unit *unit, bool from_mirror);
/* Its data stay where they are, until others need the memory. */
void unit_keep(struct unit *unit);
/* Ends it: nobody waits, nothing is under way. Others get its room. */
void unit_end(struct unit *unit);
/* Ends what can be ended now. */
void units_stop(struct fetcher *fetcher);

/* choice.c */

/*
 * The one that was tried least, of these one that has not failed much of late, of these the first.
 * NULL: none now, but perhaps at `*at_ns` (UINT64_MAX: nobody knows).
 */
struct mirror *mirror_choose(struct unit *unit, uint64_t now_ns, uint64_t *at_ns);
/* Whether another one than that may be of use. */
bool mirror_has_other(const struct unit *unit, const struct mirror *mirror, uint64_t now_ns);
/* Whether there is no reason to wait: another mirror was tried less, or none is left. */
bool mirrors_go_on(const struct unit *unit, unsigned tries, uint64_t now_ns);
/* Whether its host has as many of our fetches as it may. */
bool mirror_is_full(const struct unit *unit, const struct mirror *mirror);
/* The same of the one that is next to be asked. */
bool unit_host_is_full(struct unit *unit);

/* attempt.c */

/* Ask a mirror, now or when it can be asked again; or fail. */
void unit_fetch(struct unit *unit);
/* Somebody who waits for it until `deadline_ns` is to be added; its attempt may have begun for nobody. */
void unit_joined(struct unit *unit, uint64_t deadline_ns);
/* The first who waits for it: its attempt is not one that gives way any more. */
void unit_demanded(struct unit *unit);
/* What was fetched is not right: unit->check.err. */
void unit_refuse(struct unit *unit);
/* What was fetched is right. */
void unit_accept(struct unit *unit);

/* verify.c: each has a hand do it, and goes on from there. */

/* Returns false, with nothing done, when the cache cannot have it. */
bool unit_look_up(struct unit *unit);
void unit_verify(struct unit *unit);
/* It is being fetched: what it is to be verified against may be read meanwhile. */
void unit_expect(const struct unit *unit);
/* Returns false, with nothing done, when there is no cache for it. */
bool unit_store(struct unit *unit);

#endif
