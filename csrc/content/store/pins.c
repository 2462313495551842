/* SPDX-License-Identifier: MIT */
/*
 * Pins: the first digest or identity that was seen is binding from then on. Threads that come
 * during a commit wait for it, and then share the next one, which one of them makes for all.
 */
#include <errno.h>
#include <string.h>

#include "base/relaxed.h"
#include "content/identity.h"
#include "content/store/internal.h"

struct pin {
	/*
	 * The writer's statements: `add` inserts the pin unless there is one; `same` tells whether
	 * that one is the same, or which text it is.
	 */
	sqlite3_stmt *add, *same;
	uint64_t source, number;
	const void *value;
	bool is_text;

	struct pin *next;
	bool done;
	int result;
};

int pin_queue_init(struct pin_queue *queue)
{
	int err = -pthread_mutex_init(&queue->lock, NULL);

	if (err)
		return err;
	queue->end = &queue->first;
	err = -pthread_cond_init(&queue->done, NULL);
	if (err)
		pthread_mutex_destroy(&queue->lock);
	return err;
}

void pin_queue_deinit(struct pin_queue *queue)
{
	pthread_cond_destroy(&queue->done);
	pthread_mutex_destroy(&queue->lock);
}

void store_lock_after_pins(struct store *store)
{
	struct pin_queue *queue = &store->pins;

	pthread_mutex_lock(&queue->lock);
	if (queue->has_leader)
		pthread_cond_wait(&queue->done, &queue->lock);
	pthread_mutex_unlock(&queue->lock);
	pthread_mutex_lock(&store->write_lock);
}

/* A text is not compared here, and has no size. */
static void bind(sqlite3_stmt *statement, const char *types, const struct pin *pin)
{
	sql_bind(statement, types, pin->source, pin->number, pin->value,
		 (size_t)SOURCE_DIGEST_BYTES);
}

static bool has_found_same(const struct pin *pin)
{
	const char *text;

	if (!pin->is_text)
		return sqlite3_column_int(pin->same, 0);
	text = (const char *)sqlite3_column_text(pin->same, 0);
	return text && identity_is_same(store_identity_of(text), pin->value);
}

/*
 * Returns a negative errno when the transaction has failed; pin->result is the result of this pin
 * alone.
 */
static int put(struct store *store, struct pin *pin)
{
	int err, is_same;

	bind(pin->add, pin->is_text ? "iit" : "iib", pin);
	err = sql_do(pin->add);
	if (err || sqlite3_changes(store->writer))
		return err;
	bind(pin->same, pin->is_text ? "ii" : "iib", pin);
	is_same = sql_step(pin->same);
	if (is_same == 1)
		pin->result = has_found_same(pin) ? 0 : -ESTALE;
	sqlite3_reset(pin->same);
	return is_same == 1 ? 0 : is_same ?: -EUCLEAN;
}

static void put_all(struct store *store, struct pin *first)
{
	int err;

	pthread_mutex_lock(&store->write_lock);
	err = store_begin(store);
	for (struct pin *pin = first; pin && !err; pin = pin->next)
		err = put(store, pin);
	if (!err)
		err = store_commit(store);
	if (err)
		store_rollback(store);
	pthread_mutex_unlock(&store->write_lock);
	if (!err)
		return;
	for (struct pin *pin = first; pin; pin = pin->next)
		pin->result = err;
}

/* To be called with the lock held, which is released meanwhile. */
static void lead(struct store *store, struct pin_queue *queue)
{
	struct pin *all = queue->first;

	queue->first = NULL;
	queue->end = &queue->first;
	relaxed_store(&queue->has_leader, true);
	pthread_mutex_unlock(&queue->lock);
	put_all(store, all);
	pthread_mutex_lock(&queue->lock);
	relaxed_store(&queue->has_leader, false);
	/* NB: a pin belongs to a waiting thread, and may be gone as soon as that thread runs. */
	while (all) {
		struct pin *next = all->next;

		all->done = true;
		all = next;
	}
	pthread_cond_broadcast(&queue->done);
}

static int wait_for(struct store *store, struct pin *pin)
{
	struct pin_queue *queue = &store->pins;

	pthread_mutex_lock(&queue->lock);
	*queue->end = pin;
	queue->end = &pin->next;
	while (!pin->done) {
		if (queue->has_leader)
			pthread_cond_wait(&queue->done, &queue->lock);
		else
			lead(store, queue);
	}
	pthread_mutex_unlock(&queue->lock);
	return pin->result;
}

int store_pin_digest(struct store *store, const struct source *source, uint64_t unit,
		     const uint8_t digest[static SOURCE_DIGEST_BYTES])
{
	struct pin pin = {
		.add = store->add_pin,
		.same = store->same_pin,
		.source = source->id,
		.number = unit,
		.value = digest,
	};

	return wait_for(store, &pin);
}

int store_pin_identity(struct store *store, const struct mirror *mirror, const char *identity)
{
	struct pin pin = {
		.add = store->add_identity,
		.same = store->same_identity,
		.source = mirror->source->id,
		.number = mirror->index,
		.value = identity,
		.is_text = true,
	};

	return wait_for(store, &pin);
}
