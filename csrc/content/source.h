/* SPDX-License-Identifier: MIT */
/*
 * A source is an object of known size that never changes. Its mirrors are the places that serve it.
 * A kind of mirror is one file in fetch/mirror/ that ends in MIRROR_KIND(ops).
 * docs/materialisation.md explains the terms.
 */
#pragma once

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/error.h"

struct codec_index;
struct codec_ops;
struct host;
struct latency;
struct mirror_ops;
struct object_ops;
struct run;
struct selection;
struct source;

enum {
	SOURCE_DIGEST_BYTES = 32, /* SHA-256 */
	SOURCE_KEY_BYTES = 32,
	SOURCE_UNIT_MIN_BYTES = 4 << 10,
	SOURCE_UNIT_MAX_BYTES = 1 << 20,
	SOURCE_UNIT_DEFAULT_BYTES = 256 << 10,
	/* of an object that is taken as a whole, where a server sends that for a range */
	SOURCE_WHOLE_MAX_BYTES = 8 << 20,
	SOURCE_MIRRORS_MAX = 16,
	/* of each mirror's caches, those that are asked */
	MIRROR_CACHES_MAX = 8,
	SOURCE_PLACES_MAX = 32, /* mirrors, and caches in front of them */
};

struct mirror {
	const struct mirror_ops *ops;
	struct source *source;
	unsigned index; /* in source->mirrors and, but for caches, in the store */
	/*
	 * NULL, or it is a cache in front of that mirror, whose kind, private data and identity are
	 * its own; see docs/design/hosts.md.
	 */
	struct mirror *origin;
	const char *via; /* the URL of a cache, without a path */
	uint64_t weight; /* of a cache, among those in front of that mirror */
	/*
	 * One line of text by which the kind recognizes the unchanged object, such as an ETag.
	 * NULL: none is pinned yet. Only for the fetcher's thread.
	 */
	char *identity;
	void *private;	/* ops->private_bytes, zeroed */
	unsigned known; /* only for process/front.c: its number there, from 1 on; 0: none yet */

	/* Only for the fetcher. */
	struct host *host;	 /* NULL: not looked up yet, or the kind has no hosts */
	struct latency *latency; /* the same */
	uint64_t avoid_until_ns; /* do not ask it before that time, as it has requested */
	/*
	 * It had another object than the pinned one, and is not asked before this time. 0: its
	 * object is unchanged, as far as is known.
	 */
	uint64_t changed_until_ns;
	/* What it has said of that for the first time, and when; NULL: nothing, or it was right since. */
	char *doubted;
	uint64_t doubted_ns;
	/* Attempts in a row that were useless for this object, whatever its host does with others. */
	unsigned bad_in_a_row;
	/* Its responses do not say how long they are, so each is for one unit. */
	bool alone;
	/* It has last sent all of the object for a range of it. */
	bool gives_all;
	uint64_t recent_ns; /* when it was last asked, or has last given such a response */
};

struct source {
	uint64_t id;	       /* in the store */
	uint64_t size;	       /* bytes, as they are read */
	uint64_t object_bytes; /* of the object that its mirrors have */
	/* NULL: the object is read as it is; else how it is decoded. */
	const struct codec_ops *codec;
	struct codec_index *index;
	/* NULL: the source is all that comes out, in order. */
	struct selection *selection;
	void *coded_kinds;   /* of its mirrors; see coded.h */
	uint32_t unit_bytes; /* a power of two */
	/* Its only mirror's ops->compute answers all reads: no fetch, no digests, no cache. */
	bool computed;
	bool has_digests; /* the store has a digest of each unit; else digests are pinned at the first fetch */
	uint8_t key[SOURCE_KEY_BYTES];
	unsigned mirror_count;
	unsigned place_count;	 /* mirrors, and then the caches in front of them */
	struct mirror *mirrors;	 /* place_count */
	void *cached;		 /* only for the cache, see cache_object_of() */
	uint64_t cache_retry_ns; /* only for the fetcher: when to try cache_object_open() again */
};

/* How a fetch failed. This decides what is tried next. */
enum fetch_failure {
	FETCH_TRANSIENT, /* no response, a reset, 5xx, too short: may work again at once, or elsewhere */
	FETCH_BUSY,	 /* 429 or 503 with a time (retry_after_ms) */
	FETCH_NO_LOGIN, /* the map's credentials cannot be read, perhaps because they are being renewed */
	FETCH_DENIED,  /* 401, 403, no permission: useless to try before something changes */
	FETCH_GONE,    /* 404, ENOENT */
	FETCH_ABSENT,  /* the same from a cache, which is no failure */
	FETCH_LATER,   /* 425 from a cache: it is getting it, so ask it again; no failure */
	FETCH_CHANGED, /* not the object that was pinned */
	FETCH_WRONG, /* a response that makes no sense: 200 for a range, an encoding, another length */
};

/* What a mirror says about its object when it is probed, before anything is mapped. */
struct mirror_probe {
	uint64_t size;	/* bytes */
	char *identity; /* malloc()ed, or NULL */
};

struct inquiry;

struct mirror_ops {
	const char *name;
	size_t private_bytes;

	/*
	 * Takes the kind's own keys out of the JSON object with keys_take_*() and checks them.
	 * Opens nothing and asks nobody. Returns 0, or -EINVAL with the error filled in.
	 */
	int (*parse)(struct mirror *mirror, json_t *keys, struct error *error);
	/* Frees what parse() and the fetches have acquired. No fetch is running. May be NULL. */
	void (*close)(struct mirror *mirror);

	/*
	 * Only for computed kinds, which have none of the functions below: fills `data`, on any
	 * thread, without waiting.
	 */
	void (*compute)(const struct mirror *mirror, uint64_t offset, uint32_t length,
			uint8_t *data);

	/*
	 * Only for what this machine has, which needs no fetcher; on any thread that may wait for
	 * files. Returns 0, or a negative errno with the error filled in.
	 */
	int (*probe)(struct mirror *mirror, struct mirror_probe *probe, struct error *error);
	/*
	 * The same for servers (inquiry.h), on the fetcher's thread, which must not wait. Of both,
	 * a kind has one, if its objects have a size.
	 */
	void (*inquire)(struct inquiry *inquiry);
	/* Of object_start() and object_inquire(), if those are its functions. */
	const struct object_ops *object;
	/* It can be asked for documents by name, not only for content. */
	bool has_names;
	/*
	 * Starts a run (run.h), on the fetcher's thread, which must not wait. The kind keeps the
	 * run's deadline itself (but see `blocking`).
	 */
	void (*start)(struct run *run);
	/*
	 * Whether start() may be called for that run on a reader's thread, which leaves the loop alone
	 * and sees no files. NULL: it may not.
	 */
	bool (*ready)(const struct run *run);
	/*
	 * Gives up early. sink->over() is still called, with -ECANCELED. NULL: a run goes on to its
	 * end.
	 */
	void (*cancel)(struct run *run);
	/* There may be space again after sink->space() has returned 0. */
	void (*resume)(struct run *run);
	/*
	 * Runs occupy workers, which cannot be stopped even when a run is given up. So few of them
	 * go on at a time, each is one unit, and the core keeps the deadline with cancel().
	 */
	bool blocking;
	/* Where the source has digests, any object will do that has its bytes. */
	bool replaceable;

	/*
	 * Writes to `text`, cut to `bytes`, what failures are counted against: a host and port, or,
	 * for a local file, its file system (its directory, as long as that is unknown). NB: not the
	 * file itself, since there may be a hundred thousand. NULL: the kind does not fail like
	 * others, and has no circuit breaker.
	 */
	const char *(*host)(const struct mirror *mirror, char *text, size_t bytes);

	/*
	 * Returns the URL of cache `number` in front of it, with its weight, or NULL. It stays as
	 * long as the mirror. NULL: the kind takes no caches.
	 */
	const char *(*cache)(const struct mirror *mirror, unsigned number, uint64_t *weight);
	/* What its keys name never changes, so that it has no identity. */
	bool immutable;
};

/* Adds a kind to an array made by the linker; see mirror_kind_find(). */
#define MIRROR_KIND(ops)                                  \
	static const struct mirror_ops *const ops##_entry \
		__attribute__((used, section("mirror_kinds"))) = &ops

const struct mirror_ops *mirror_kind_find(const char *name);

/*
 * Makes a source from its JSON text (docs/materialisation.md), which is not changed. Returns 0,
 * -EINVAL with the error filled in, or -ENOMEM.
 */
int source_parse(const json_t *text, struct source **source, struct error *error);
void source_free(struct source *source);

/* Whether its object must have the identity that it had at first. */
static inline bool mirror_is_pinned(const struct mirror *mirror)
{
	return !(mirror->ops->replaceable && mirror->source->has_digests);
}

/* The mirror that has the object: itself, or that behind a cache. */
static inline struct mirror *mirror_object(struct mirror *mirror)
{
	return mirror->origin ?: mirror;
}
