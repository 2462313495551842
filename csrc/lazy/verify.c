/* SPDX-License-Identifier: MIT */
/* Verifies units against known digests, or pins new ones; mostly on workers. */
#include <errno.h>
#include <openssl/evp.h>
#include <stdlib.h>
#include <string.h>

#include "content/store.h"
#include "lazy/core.h"

enum {
	/* the place of jobs that may pin, and so wait for other writers of the map */
	MAP_PLACE = 1,
};

static struct unit *of_job(struct pool_job *job)
{
	return container_of(job, struct unit, job);
}

static void have_done(struct unit *unit, uint64_t place, void (*work)(struct pool_job *job),
		      void (*done)(struct pool_job *job))
{
	unit->job.work = work;
	unit->job.done = done;
	unit->job.place = place;
	core_submit(&unit->core->workers, &unit->job);
}

static int pin_identity(const struct unit *unit)
{
	if (!unit->identity)
		return 0;
	return store_pin_identity(unit->core->store, unit->mirror, unit->identity);
}

static int pin_digest(struct unit *unit, const uint8_t digest[static SOURCE_DIGEST_BYTES])
{
	int err = store_pin_digest(unit->core->store, unit->source, unit->number, digest);

	unit->check.pinned = !err;
	/* Another fetch has pinned its content first, and readers have got that. */
	return err == -ESTALE ? -EBADMSG : err;
}

/* Returns false when there is no memory. */
static bool hash(struct unit *unit)
{
	struct unit_check *check = &unit->check;

	if (!check->hashed)
		check->hashed = EVP_Digest(unit->data, unit->length, check->digest, NULL,
					   unit->core->sha256, NULL);
	return check->hashed;
}

/* The same on the fetcher's thread, which has a context for that: EVP_Digest() makes one. */
static bool hash_here(struct unit *unit)
{
	struct unit_check *check = &unit->check;
	EVP_MD_CTX *context = unit->core->hash;

	if (!check->hashed)
		check->hashed = EVP_DigestInit_ex2(context, unit->core->sha256, NULL) &&
				EVP_DigestUpdate(context, unit->data, unit->length) &&
				EVP_DigestFinal_ex(context, check->digest, NULL);
	return check->hashed;
}

static int check(struct unit *unit)
{
	const uint8_t *found = unit->check.digest;
	uint8_t expected[SOURCE_DIGEST_BYTES];
	int known = store_digest(unit->core->store, unit->source, unit->number, expected);
	int err;

	if (known < 0)
		return known;
	if (!hash(unit))
		return -ENOMEM;
	unit->check.known = known;
	if (known && memcmp(found, expected, sizeof(expected)) != 0)
		return -EBADMSG;
	/*
	 * NB: pin the identity before the digest. If another identity had been pinned first, this
	 * digest would stay although that content was never read, and the right content would be
	 * refused for ever.
	 */
	err = pin_identity(unit);
	if (!known)
		return err ?: pin_digest(unit, found);
	if (err && err != -ESTALE) {
		/* The digest proves the content, whatever identity the object has. */
		unit->check.disk_err = err;
		free(unit->identity);
		unit->identity = NULL;
		err = 0;
	}
	return err;
}

static void verify(struct pool_job *job)
{
	struct unit *unit = of_job(job);

	int err;

	if (!unit->core->store)
		return;
	err = check(unit);
	unit->check.err = err;
	if (err && err != -EBADMSG && err != -ESTALE)
		unit->check.disk_err = err;
}

static void verified(struct pool_job *job)
{
	struct unit *unit = of_job(job);

	if (unit->check.disk_err || unit->check.pinned)
		disk_note(unit->core, DISK_OF_MAP, unit->check.disk_err);
	completion_put(unit->core, &unit->news);
}

/* Verifies a unit on the fetcher's thread. Returns false at once when a worker has to do it. */
static bool verify_at_once(struct unit *unit)
{
	const struct core *core = unit->core;
	uint8_t expected[SOURCE_DIGEST_BYTES];

	if (!unit->check.hashed &&
	    unit->length > (core->busy > 1 ? HASH_AT_ONCE_BYTES : HASH_ALONE_BYTES))
		return false;
	/* Pinning an identity waits for the disk. */
	if (!core->store || unit->identity ||
	    !store_digest_at_hand(core->store, unit->source, unit->number, expected) ||
	    !hash_here(unit))
		return false;
	unit->check.known = true;
	unit->check.err = memcmp(unit->check.digest, expected, sizeof(expected)) ? -EBADMSG : 0;
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

	store_load_digests(load->store, load->source, load->number);
}

static void digest_loaded(struct pool_job *job)
{
	free(container_of(job, struct digest_load, job));
}

void unit_expect(const struct unit *unit)
{
	struct store *store = unit->core->store;
	uint8_t unused[SOURCE_DIGEST_BYTES];
	struct digest_load *load;

	if (!store || !unit->source->has_digests ||
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
	core_submit(&unit->core->workers, &load->job);
}

bool unit_verify(struct unit *unit)
{
	bool may_pin;

	unit_set(unit, UNIT_CHECKING);
	if (unit->check.err || verify_at_once(unit))
		return true;
	may_pin = !unit->source->has_digests || unit->identity;
	have_done(unit, may_pin ? MAP_PLACE : 0, verify, verified);
	return false;
}
