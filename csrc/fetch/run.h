/* SPDX-License-Identifier: MIT */
/*
 * A run: one request, for units that are neighbours, to one mirror. Each of them is the core's again
 * as soon as it is whole, so a failure costs only those that lack.
 */
#pragma once

#include <errno.h>
#include <openssl/types.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/uio.h>

#include "base/completion.h"
#include "base/error.h"
#include "content/source.h"
#include "fetch/timer_queue.h"

struct coded_run;
struct core;
struct fetcher;
struct run;
struct unit;

/* Where what arrives belongs. A mirror's kind calls these on the fetcher's thread. */
struct run_sink {
	/*
	 * Stores in `parts`, which has `room` entries, where the next bytes belong. Returns how
	 * many it has stored; 0: there is no place for them now, and ops->resume() follows, or
	 * ops->cancel().
	 */
	int (*space)(struct run *run, struct iovec *parts, int room);
	/* These bytes are there, at the beginning of what space() has said last. */
	void (*take)(struct run *run, size_t bytes);
	/*
	 * For kinds that block, instead of both: all bytes are there, in `data`, which is
	 * malloc()ed. Returns what the caller shall free.
	 */
	uint8_t *(*take_all)(struct run *run, uint8_t *data);
	/*
	 * Only where run->widens, before any byte: all of the object comes, from its first byte on,
	 * and is taken. run->offset and run->length say so then.
	 */
	void (*widen)(struct run *run);
	/*
	 * The kind has no data of this run any more. To be called once, perhaps before ops->start()
	 * returns; it calls nothing back.
	 */
	void (*over)(struct run *run);
};

struct run {
	/* Set by the caller of start(). */
	const struct run_sink *sink;
	struct fetcher *fetcher;
	struct mirror *mirror;
	uint64_t offset;      /* bytes, in the source */
	uint32_t length;      /* bytes; the range ends within the source */
	uint32_t coded_bytes; /* only set by coded.c: how many of the object were asked for */
	uint64_t deadline_ns; /* CLOCK_MONOTONIC: when the kind shall give it up */
	/* Use no kept connection, because an earlier attempt got no complete response. */
	bool fresh;
	/*
	 * Refuse a response that does not say how much it sends, or units would be taken before it
	 * is known that it sends more. They are asked for one by one then.
	 */
	bool sized;
	/* All of the object is as good as the range. */
	bool widens;
	/* A unit of it has failed before, so nothing is taken that was kept. */
	bool again;
	/*
	 * Set by the kind: the request waits for something of this machine, so the server is not
	 * late with an answer. When it goes out, the kind clears this, and sets `began_ns`.
	 */
	bool held;

	/*
	 * A counter of what has arrived, for kinds that can be cancelled. A run that gets nothing
	 * for a while may be cancelled before its deadline.
	 */
	unsigned progress;
	uint64_t began_ns;     /* when the request went out */
	uint64_t given_before; /* what its host had given when it began, in bytes */

	/*
	 * The outcome. `result` is 0, and all bytes were taken; or it is a negative errno, with the
	 * failure and the text for the log, which contains no credentials and no query of a URL.
	 */
	int result;
	enum fetch_failure failure;
	uint32_t retry_after_ms; /* 0: the server did not say */
	struct error error;
	bool unsized; /* it was refused because of `sized` */
	bool cut;     /* no complete response came: its connection may be dead */
	bool whole;   /* all of the object came, or what lies before the range, and that */
	/*
	 * The identity to pin, where mirror->identity is NULL (malloc()ed; the core frees it). It
	 * is there before the first byte is taken. NULL where the kind has none.
	 */
	char *identity;

	void *private;		 /* only for the mirror's kind, while the run goes on */
	struct coded_run *coded; /* only for coded.c */

	/* The core's own. */
	struct core *core;
	struct unit **units; /* those behind `count` have left */
	struct unit *only;   /* is `units`, where it is one */
	unsigned asked, count;
	unsigned next;	 /* the unit that arrives; those before it have left */
	uint32_t filled; /* bytes of that */
	/* Where the next byte belongs in the source: before the unit that arrives, it is dropped. */
	uint64_t at;
	bool widened;	  /* it has all units of the object that it can get */
	EVP_MD_CTX *hash; /* of its first bytes; NULL: it was not needed yet */
	uint32_t hashed;  /* how many */
	bool demanded;	  /* a reader has waited for one of them */
	bool is_over;
	bool slow;	    /* it is given up, though its cache answers others */
	bool local_failure; /* of this machine, which says nothing of its host */
	bool silent; /* it is given up, because its cache has answered nobody since it began */
	/* Its failure costs its units no try: memory or a length lacked, or another run got it. */
	bool uncharged;
	uint64_t first_ns; /* when the first byte was there */
	uint64_t last_ns;  /* when the last ones were that have come so far */
	uint64_t until_ns; /* when the unit that arrives should be whole */
	uint64_t arrived_bytes;
	struct timer timer; /* what is checked then: silence, or a deadline */
	unsigned progress_seen;
	uint64_t watched_ns;   /* since when its silence has been measured */
	struct link paused;    /* in core->paused: it waits for memory */
	struct link unstarted; /* in core->unstarted: the kind does not have it yet */
	struct completion news;
};

/* Ends a run that has failed, with its error filled in: `err` is what error_set() returns. */
static inline void run_failed(struct run *run, enum fetch_failure failure, int err)
{
	run->result = err;
	run->failure = failure;
	run->sink->over(run);
}

static inline void run_lacks_memory(struct run *run)
{
	run_failed(run, FETCH_TRANSIENT,
		   error_set(&run->error, -ENOMEM, "no memory for a request"));
}
