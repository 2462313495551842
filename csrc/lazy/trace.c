/* SPDX-License-Identifier: MIT */
#include "lazy/trace.h"

#include <errno.h>
#include <stdlib.h>
#include <time.h>

#include "base/clock.h"

struct trace_log {
	uint64_t limit, began_ns;
	uint64_t used;	   /* atomic: entries taken by threads; may exceed the limit */
	uint64_t lost;	   /* atomic */
	uint64_t until_ns; /* atomic: when the lease ends */
	uint64_t mask;	/* of `seen`, whose size is a power of two and at least twice the limit */
	uint64_t *seen; /* atomic: fingerprints of (source, block); 0: a free slot */
	struct trace_entry *entries;
};

/*
 * A hash of 64 bits, never 0. Two blocks with the same one are all but impossible, and would only
 * cost an entry.
 */
static uint64_t fingerprint(uint64_t source, uint64_t block)
{
	uint64_t x = block * 0x9e3779b97f4a7c15ull + source * 0xd1b54a32d192ed03ull;

	x = (x ^ x >> 32) * 0xd6e8feb86659fd93ull;
	x = (x ^ x >> 32) * 0xd6e8feb86659fd93ull;
	return (x ^ x >> 32) ?: 1;
}

/* Returns false when the mark was there already, or there is no slot for it. */
static bool add_seen(struct trace_log *log, uint64_t mark)
{
	uint64_t place = mark & log->mask;

	for (;; place = (place + 1) & log->mask) {
		uint64_t found = relaxed_load(&log->seen[place]);

		if (!found && relaxed_load(&log->used) >= log->limit) {
			__atomic_add_fetch(&log->lost, 1, __ATOMIC_RELAXED);
			return false;
		}
		if (!found && __atomic_compare_exchange_n(&log->seen[place], &found, mark, false,
							  __ATOMIC_RELAXED, __ATOMIC_RELAXED))
			return true;
		if (found == mark)
			return false;
	}
}

static void note(struct trace_log *log, uint64_t source, uint64_t block)
{
	struct trace_entry *entry;
	uint64_t number;

	if (!add_seen(log, fingerprint(source, block)))
		return;
	number = __atomic_fetch_add(&log->used, 1, __ATOMIC_RELAXED);
	/* Other threads took the last entries at the same time. */
	if (number >= log->limit) {
		__atomic_add_fetch(&log->lost, 1, __ATOMIC_RELAXED);
		return;
	}
	entry = &log->entries[number];
	entry->source = source;
	entry->block = block;
	__atomic_store_n(&entry->at_ns, clock_now_ns() - log->began_ns + 1, __ATOMIC_RELEASE);
}

static bool is_over(const struct trace_log *log)
{
	return clock_now_ns() >= relaxed_load(&log->until_ns);
}

static void log_free(struct trace_log *log)
{
	if (!log)
		return;
	free(log->seen);
	free(log->entries);
	free(log);
}

/* To be called with the lock held. */
static void drop(struct trace *trace)
{
	const struct timespec moment = { .tv_nsec = 100000 };
	struct trace_log *log = trace->log;

	__atomic_store_n(&trace->log, NULL, __ATOMIC_SEQ_CST);
	while (__atomic_load_n(&trace->noting, __ATOMIC_SEQ_CST))
		nanosleep(&moment, NULL);
	log_free(log);
}

/*
 * Ends a recording whose lease is over. Readers call this and must not wait: the holder of the lock
 * renews the lease, or the next read ends it.
 */
static void end_if_over(struct trace *trace)
{
	if (pthread_mutex_trylock(&trace->lock))
		return;
	if (trace->log && is_over(trace->log))
		drop(trace);
	pthread_mutex_unlock(&trace->lock);
}

void trace_note_blocks(struct trace *trace, const struct source *source, uint64_t offset,
		       uint64_t length)
{
	uint64_t end = offset + length < source->size ? offset + length : source->size;
	struct trace_log *log;
	bool over;

	/*
	 * NB: in this order, a thread that takes the log away sees us, or we see that it is gone.
	 */
	__atomic_add_fetch(&trace->noting, 1, __ATOMIC_SEQ_CST);
	log = __atomic_load_n(&trace->log, __ATOMIC_SEQ_CST);
	over = log && is_over(log);
	if (log && !over) {
		for (uint64_t block = offset / TRACE_BLOCK_BYTES; block * TRACE_BLOCK_BYTES < end;
		     block++)
			note(log, source->id, block);
	}
	__atomic_sub_fetch(&trace->noting, 1, __ATOMIC_SEQ_CST);
	/* NB: only now, because drop() waits for threads that are noting. */
	if (over)
		end_if_over(trace);
}

static struct trace_log *log_new(uint64_t limit, uint64_t lease_ns)
{
	struct trace_log *log = calloc(1, sizeof(*log));
	uint64_t places =
		1024; /* threads that come at the same time may exceed the limit by some */

	if (!log)
		return NULL;
	while (places < 2 * limit)
		places *= 2;
	log->limit = limit;
	log->mask = places - 1;
	log->seen = calloc(places, sizeof(*log->seen));
	log->entries = calloc(limit, sizeof(*log->entries));
	log->began_ns = clock_now_ns();
	log->until_ns = log->began_ns + lease_ns;
	if (log->seen && log->entries)
		return log;
	log_free(log);
	return NULL;
}

int trace_start(struct trace *trace, uint64_t limit, uint64_t *id)
{
	struct trace_log *log;
	int err = 0;

	pthread_mutex_lock(&trace->lock);
	if (trace->log && !is_over(trace->log))
		err = -EBUSY;
	log = err ? NULL : log_new(limit, trace->lease_ns);
	if (!err && !log)
		err = -ENOMEM;
	if (!err) {
		drop(trace);
		*id = ++trace->id;
		__atomic_store_n(&trace->log, log, __ATOMIC_SEQ_CST);
	}
	pthread_mutex_unlock(&trace->lock);
	return err;
}

static int copy(struct trace_log *log, uint64_t from, struct trace_entry *entries, unsigned room,
		struct trace_status *status)
{
	uint64_t used = relaxed_load(&log->used);
	unsigned count = 0;

	if (used > log->limit)
		used = log->limit;
	/* Stop at an entry that is not written yet. */
	for (; count < room && from + count < used; count++) {
		const struct trace_entry *entry = &log->entries[from + count];
		uint64_t at_ns = __atomic_load_n(&entry->at_ns, __ATOMIC_ACQUIRE);

		if (!at_ns)
			break;
		entries[count] = (struct trace_entry){ .source = entry->source,
						       .block = entry->block,
						       .at_ns = at_ns - 1 };
	}
	*status = (struct trace_status){
		.blocks = used,
		.limit = log->limit,
		.lost = relaxed_load(&log->lost),
		.elapsed_ns = clock_now_ns() - log->began_ns,
	};
	return (int)count;
}

int trace_read(struct trace *trace, uint64_t id, uint64_t from, struct trace_entry *entries,
	       unsigned room, struct trace_status *status)
{
	int count = -ESTALE;

	pthread_mutex_lock(&trace->lock);
	if (trace->log && trace->id == id)
		count = copy(trace->log, from, entries, room, status);
	if (count >= 0)
		relaxed_store(&trace->log->until_ns, clock_now_ns() + trace->lease_ns);
	pthread_mutex_unlock(&trace->lock);
	return count;
}

void trace_stop(struct trace *trace, uint64_t id)
{
	pthread_mutex_lock(&trace->lock);
	if (trace->log && trace->id == id)
		drop(trace);
	pthread_mutex_unlock(&trace->lock);
}

void trace_init(struct trace *trace)
{
	pthread_mutex_init(&trace->lock, NULL);
	trace->lease_ns = TRACE_LEASE_S * NS_PER_S;
}

void trace_deinit(struct trace *trace)
{
	log_free(trace->log);
	pthread_mutex_destroy(&trace->lock);
}
