/* SPDX-License-Identifier: MIT */
/*
 * A source: an object of known size that never changes, and its mirrors: the places that serve it.
 * A kind of mirror is one file in lazy/mirror/ that ends in MIRROR_KIND(ops). See
 * docs/materialisation.md for the words.
 */
#ifndef LAZY_SOURCE_H
#define LAZY_SOURCE_H

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "lazy/complaint.h"

struct breaker;
struct fetcher;
struct latency;
struct mirror_ops;
struct source;

enum {
	SOURCE_DIGEST_BYTES = 32, /* SHA-256 */
	SOURCE_KEY_BYTES = 32,
	SOURCE_UNIT_MIN_BYTES = 4 << 10,
	SOURCE_UNIT_MAX_BYTES = 1 << 20,
	SOURCE_UNIT_DEFAULT_BYTES = 256 << 10,
	SOURCE_MIRRORS_MAX = 16,
};

struct mirror {
	const struct mirror_ops *ops;
	struct source *source;
	unsigned index; /* in source->mirrors, and in the store */
	/*
	 * What the kind knows an unchanged object by, as one line of text (an ETag, say); NULL: it has
	 * not been pinned yet. The fetcher's thread only.
	 */
	char *identity;
	void *private; /* ops->private_bytes, zeroed */

	/* The fetcher's own. */
	struct breaker *breaker; /* of its host; NULL: not looked up yet, or the kind has none */
	struct latency *latency; /* the same */
	uint64_t avoid_until_ns; /* as it has asked for */
	/* It is not what was pinned, so it is not asked until then; 0: it is, as far as is known. */
	uint64_t changed_until_ns;
	/* Answers that were of no use: of its object, whatever its host does with others. */
	unsigned bad_in_a_row;
	uint64_t recent_ns; /* when it was asked last, or has given one of these since */
};

struct source {
	uint64_t id;	     /* in the store */
	uint64_t size;	     /* bytes */
	uint32_t unit_bytes; /* a power of two */
	bool computed;	  /* its only mirror's ops->compute answers; all that follows is unused */
	bool has_digests; /* in the store, of each unit; else they are pinned at first fetch */
	uint8_t key[SOURCE_KEY_BYTES];
	unsigned mirror_count;
	struct mirror *mirrors;
	void *cached;		 /* the cache's own, see cache_object_of() */
	uint64_t cache_retry_ns; /* the fetcher's own: when to try cache_object_open() again */
};

static inline uint64_t source_units(const struct source *source)
{
	return (source->size + source->unit_bytes - 1) / source->unit_bytes;
}

/* Of unit `unit`: less than unit_bytes for the last one only. */
static inline uint32_t source_unit_length(const struct source *source, uint64_t unit)
{
	uint64_t rest = source->size - unit * source->unit_bytes;

	return rest < source->unit_bytes ? (uint32_t)rest : source->unit_bytes;
}

/* How a fetch failed, which decides what is tried next. */
enum fetch_failure {
	FETCH_TRANSIENT, /* no answer, a reset, 5xx, too short: may work again at once, or elsewhere */
	FETCH_BUSY,	 /* 429 or 503 with a time (retry_after_ms) */
	FETCH_NO_LOGIN, /* our own credentials cannot be read, as while they are being renewed */
	FETCH_DENIED,	/* 401, 403, no permission: not before something changes */
	FETCH_GONE,	/* 404, ENOENT */
	FETCH_CHANGED,	/* not the object that was pinned */
	FETCH_WRONG, /* an answer that makes no sense: 200 for a range, a coding, another length */
};

/* One attempt to read [offset, offset + length) of the source from one mirror. */
struct fetch {
	/* Set by the fetcher. */
	struct fetcher *fetcher;
	struct mirror *mirror;
	uint64_t offset; /* bytes, in the source */
	uint32_t length; /* bytes; ends within the source */
	uint8_t *data;
	uint64_t deadline_ns; /* CLOCK_MONOTONIC: when this attempt is to be given up */
	bool fresh;	      /* over no connection that was kept: what came over one was cut */

	/*
	 * How often something has come, while it runs: kinds that can be cancelled count it. One that
	 * gets nothing for a while may be cancelled before its deadline.
	 */
	unsigned progress;

	/*
	 * The answer. `result`: 0, and all of `data` is filled, or a negative errno, and the failure,
	 * and what to write to the log: no credentials, no query of a URL.
	 */
	int result;
	enum fetch_failure failure;
	uint32_t retry_after_ms; /* 0: not said */
	struct complaint complaint;
	bool cut; /* no whole answer came: its connection may be dead */
	/*
	 * With result 0, where mirror->identity is NULL: what it is to be from now on (malloc()ed;
	 * the fetcher takes it), or NULL where the kind has nothing of the kind.
	 */
	char *identity;

	void *private; /* of the mirror's kind, while it runs */
};

/* What a mirror says of its object when it is asked before it is mapped. */
struct mirror_probe {
	uint64_t size;	/* bytes */
	char *identity; /* malloc()ed, or NULL */
};

struct mirror_ops {
	const char *name;
	size_t private_bytes;

	/*
	 * Take the kind's own keys out of the JSON object with keys_take_*() and check them. Nothing
	 * is opened or asked. Returns 0, or -EINVAL with the complaint filled in.
	 */
	int (*parse)(struct mirror *mirror, json_t *keys, struct complaint *complaint);
	/* Frees what parse() and the fetches have acquired; no fetch is running. NULL: nothing. */
	void (*close)(struct mirror *mirror);

	/* Computed kinds only: fill `data`, on any thread, without waiting. The others are NULL. */
	void (*compute)(const struct mirror *mirror, uint64_t offset, uint32_t length,
			uint8_t *data);

	/* On a hand: may wait, for `timeout_ms` at most. Returns 0, or a negative errno and why. */
	int (*probe)(struct mirror *mirror, uint32_t timeout_ms, struct mirror_probe *probe,
		     struct complaint *complaint);
	/*
	 * On the fetcher's thread, which must not wait: start, and have fetch_done() called on that
	 * thread, once, perhaps before this returns. The kind keeps the deadline itself (but see on_hands).
	 */
	void (*fetch)(struct fetch *fetch);
	/* Give up early. fetch_done() is still called (-ECANCELED). NULL: it runs to its end. */
	void (*cancel)(struct fetch *fetch);
	/*
	 * Its fetches wait on hands, which cannot be stopped even when a fetch is given up: few run at a
	 * time, and the deadline is kept by cancel().
	 */
	bool on_hands;

	/*
	 * Whom a failure is counted against: a host and port, or what files of this machine fail with. NB:
	 * not each of them, there may be a hundred thousand. In `text`, cut to `bytes`. NULL: it does not
	 * fail as others do, and has no circuit breaker.
	 */
	const char *(*host)(const struct mirror *mirror, char *text, size_t bytes);
};

/* Linked into one array; see mirror_kind_find(). */
#define MIRROR_KIND(ops)                                  \
	static const struct mirror_ops *const ops##_entry \
		__attribute__((used, section("mirror_kinds"))) = &ops

const struct mirror_ops *mirror_kind_find(const char *name);
/* "file, http, memset, ...", in `text`. */
const char *mirror_kind_names(char *text, size_t bytes);

/*
 * Make a source of its JSON text (docs/materialisation.md), which stays as it is. Returns 0, or
 * -EINVAL with the complaint filled in, or -ENOMEM.
 */
int source_parse(const json_t *text, struct source **source, struct complaint *complaint);
void source_free(struct source *source);

/* For the kinds: `fetch` is over. */
void fetch_done(struct fetch *fetch);
/* Fills in the answer of a failure, printf()-like, and calls fetch_done(). */
void fetch_failed(struct fetch *fetch, int err, enum fetch_failure failure, const char *format, ...)
	__attribute__((format(printf, 4, 5)));

#endif
