/* SPDX-License-Identifier: MIT */
/*
 * Jobs of workers for units: look them up in the cache, verify them against known digests or pin
 * new ones, and put them in the cache.
 */
#include <errno.h>
#include <openssl/evp.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/fileio.h"
#include "base/relaxed.h"
#include "lazy/cache.h"
#include "lazy/store.h"
#include "lazy/unit.h"

enum {
	CACHE_RETRY_S = 10,
	/* the place of jobs that may pin, and so wait for whoever writes to the map */
	MAP_PLACE = 1,
	/*
	 * SHA-256 of this many bytes takes no longer than waking a worker and being woken by it. A
	 * single unit in flight may be larger: the fetcher's thread has nothing else to do
	 * meanwhile.
	 */
	AT_ONCE_BYTES = 16 << 10,
	ALONE_AT_ONCE_BYTES = 64 << 10,
};

static struct unit *unit_of(struct pool_job *job)
{
	return container_of(job, struct unit, job);
}

static void have_done(struct unit *unit, uint64_t place, void (*work)(struct pool_job *job),
		      void (*done)(struct pool_job *job))
{
	unit->job.work = work;
	unit->job.done = done;
	unit->job.place = place;
	fetcher_submit(unit->fetcher, &unit->job);
}

static void look_up(struct pool_job *job)
{
	struct unit *unit = unit_of(job);
	struct cache_object *object = cache_object_of(unit->source);
	struct cache_lookup lookup;
	int err = 0;

	if (!object)
		err = cache_object_open(unit->fetcher->cache, unit->source, &object);
	unit->check.err = err;
	if (err || !cache_lookup(object, unit->number, unit->number, &lookup))
		return;
	err = pread_full(cache_fd(object), unit->data, unit->length,
			 unit->number * unit->source->unit_bytes);
	if (!err && !cache_lookup_is_valid(object, &lookup))
		return;
	unit->check.found = !err && cache_verify(object, unit->number * unit->source->unit_bytes,
						 unit->data, unit->length);
	/* It is fetched, and put into the cache again. */
	if (!unit->check.found)
		cache_drop(object, unit->number);
}

static void looked_up(struct pool_job *job)
{
	struct unit *unit = unit_of(job);
	struct fetcher *fetcher = unit->fetcher;

	if (unit->check.err) {
		relaxed_add(&fetcher->counts.store_failures, 1);
		disk_note(fetcher, DISK_OF_CACHE, unit->check.err);
		unit->source->cache_retry_ns = clock_now_ns() + CACHE_RETRY_S * NS_PER_S;
		event_log(fetcher, &(struct event){ .name = "not_cached", .source = unit->source },
			  "%s", strerror(-unit->check.err));
	}
	if (unit->check.found) {
		relaxed_add(&fetcher->counts.units_from_cache, 1);
		unit_ready(unit, false);
	} else if (fetcher->ending) {
		unit_end(unit);
	} else {
		unit_fetch(unit);
	}
}

bool unit_look_up(struct unit *unit)
{
	struct cache *cache = unit->fetcher->cache;
	const struct cache_object *object;

	if (!cache)
		return false;
	object = cache_object_of(unit->source);
	if (!object && clock_now_ns() < unit->source->cache_retry_ns)
		return false;
	if (object && !cache_has(object, unit->number, unit->number))
		return false;
	unit->check = (struct unit_check){};
	unit_set_state(unit, UNIT_LOOKING);
	have_done(unit, 0, look_up, looked_up);
	return true;
}

static int pin_identity(const struct unit *unit)
{
	const struct fetch *fetch = &unit->fetch;

	if (!fetch->identity)
		return 0;
	return store_pin_identity(unit->fetcher->store, fetch->mirror, fetch->identity);
}

static int pin_digest(struct unit *unit, const uint8_t digest[static SOURCE_DIGEST_BYTES])
{
	int err = store_pin_digest(unit->fetcher->store, unit->source, unit->number, digest);

	unit->check.pinned = !err;
	/* Another fetch has pinned its content first, and readers have got that. */
	return err == -ESTALE ? -EBADMSG : err;
}

static int check(struct unit *unit)
{
	uint8_t found[SOURCE_DIGEST_BYTES], expected[SOURCE_DIGEST_BYTES];
	int known = store_digest(unit->fetcher->store, unit->source, unit->number, expected);
	int err;

	if (known < 0)
		return known;
	if (!EVP_Digest(unit->data, unit->length, found, NULL, unit->fetcher->sha256, NULL))
		return -ENOMEM;
	unit->check.known = known;
	if (known && memcmp(found, expected, sizeof(found)) != 0)
		return -EBADMSG;
	/*
	 * NB: pin the identity before the digest. If another identity had been pinned first, our
	 * digest would stay although nobody has read that content, and the right content would be
	 * refused for ever.
	 */
	err = pin_identity(unit);
	if (!known)
		return err ?: pin_digest(unit, found);
	if (err && err != -ESTALE) {
		/* The digest proves the content, whatever identity the object has. */
		unit->check.disk_err = err;
		free(unit->fetch.identity);
		unit->fetch.identity = NULL;
		err = 0;
	}
	return err;
}

static void verify(struct pool_job *job)
{
	struct unit *unit = unit_of(job);

	int err;

	if (!unit->fetcher->store)
		return;
	err = check(unit);
	unit->check.err = err;
	if (err && err != -EBADMSG && err != -ESTALE)
		unit->check.disk_err = err;
}

static void verified(struct pool_job *job)
{
	struct unit *unit = unit_of(job);

	if (unit->check.disk_err || unit->check.pinned)
		disk_note(unit->fetcher, DISK_OF_MAP, unit->check.disk_err);
	if (!unit->check.err)
		unit_accept(unit);
	else
		unit_refuse(unit);
}

/* Verifies a unit on the fetcher's thread. Returns false at once when a worker has to do it. */
static bool verify_at_once(struct unit *unit)
{
	const struct fetcher *fetcher = unit->fetcher;
	uint8_t found[SOURCE_DIGEST_BYTES], expected[SOURCE_DIGEST_BYTES];

	if (unit->length > (fetcher->busy > 1 ? AT_ONCE_BYTES : ALONE_AT_ONCE_BYTES))
		return false;
	/* Pinning an identity waits for the disk. */
	if (!fetcher->store || unit->fetch.identity ||
	    !store_digest_at_hand(fetcher->store, unit->source, unit->number, expected) ||
	    !EVP_Digest(unit->data, unit->length, found, NULL, fetcher->sha256, NULL))
		return false;
	unit->check.known = true;
	unit->check.err = memcmp(found, expected, sizeof(found)) ? -EBADMSG : 0;
	verified(&unit->job);
	return true;
}

/* This belongs to no unit: the unit may be verified or given up before the digest is loaded. */
struct digest_load {
	struct pool_job job;
	struct store *store;
	const struct source *source;
	uint64_t number;
};

static void load_digest(struct pool_job *job)
{
	const struct digest_load *load = container_of(job, struct digest_load, job);
	uint8_t unused[SOURCE_DIGEST_BYTES];

	store_digest(load->store, load->source, load->number, unused);
}

static void digest_loaded(struct pool_job *job)
{
	free(container_of(job, struct digest_load, job));
}

void unit_expect(const struct unit *unit)
{
	struct store *store = unit->fetcher->store;
	uint8_t unused[SOURCE_DIGEST_BYTES];
	struct digest_load *load;

	if (unit->length > ALONE_AT_ONCE_BYTES || !store || !unit->source->has_digests ||
	    store_digest_at_hand(store, unit->source, unit->number, unused))
		return;
	load = malloc(sizeof(*load));
	if (!load)
		return;
	*load = (struct digest_load){
		.job = { .work = load_digest, .done = digest_loaded },
		.store = store,
		.source = unit->source,
		.number = unit->number,
	};
	fetcher_submit(unit->fetcher, &load->job);
}

void unit_verify(struct unit *unit)
{
	bool may_pin;

	unit->check = (struct unit_check){};
	unit_set_state(unit, UNIT_CHECKING);
	if (verify_at_once(unit))
		return;
	may_pin = !unit->source->has_digests || unit->fetch.identity;
	have_done(unit, may_pin ? MAP_PLACE : 0, verify, verified);
}

static void store(struct pool_job *job)
{
	struct unit *unit = unit_of(job);

	unit->check.err =
		cache_put(cache_object_of(unit->source), unit->number, unit->data, unit->length);
}

static void stored(struct pool_job *job)
{
	struct unit *unit = unit_of(job);
	struct fetcher *fetcher = unit->fetcher;

	disk_note(fetcher, DISK_OF_CACHE, unit->check.err);
	if (!unit->check.err) {
		relaxed_add(&fetcher->counts.units_stored, 1);
		unit_end(unit);
		return;
	}
	relaxed_add(&fetcher->counts.store_failures, 1);
	event_log(fetcher, &(struct event){ .name = "not_cached", .unit = unit }, "%s",
		  strerror(-unit->check.err));
	unit_keep(unit);
}

bool unit_store(struct unit *unit)
{
	if (!unit->fetcher->cache || !cache_object_of(unit->source))
		return false;
	unit->check = (struct unit_check){};
	have_done(unit, 0, store, stored);
	return true;
}
