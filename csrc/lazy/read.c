/* SPDX-License-Identifier: MIT */
/* Reads: the units that they wait for, their deadlines, and their results. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/relaxed.h"
#include "lazy/layout.h"
#include "lazy/unit.h"

/* Zeroes the bytes between the end of the source and the end of its last block. */
static void clear_tail(const struct lazy_read *read)
{
	uint64_t size = read->source->size;
	uint64_t end = read->offset + read->length;

	if (end > size)
		memset(read->data + (size - read->offset), 0, end - size);
}

/* Ends no other read, and begins no unit. */
static void read_end(struct fetcher *fetcher, struct lazy_read *read, int result)
{
	struct waiter *waiter = read->waiters;

	timer_clear(&read->deadline);
	list_remove(&read->link);
	while (waiter) {
		struct waiter *next = waiter->next_of_read;
		struct unit *unit = waiter->unit;

		/* NB: `unit` may be freed already if it was delivered. */
		if (link_is_in_list(&waiter->link)) {
			list_remove(&waiter->link);
			if (list_is_empty(&unit->waiters))
				unit_left_alone(unit);
		}
		free(waiter);
		waiter = next;
	}
	relaxed_add(&fetcher->counts.reads_waiting, -1);
	if (result)
		relaxed_add(&fetcher->counts.read_errors, 1);
	else
		clear_tail(read);
	read->done(read, result);
}

/* Copies what the unit and the read have in common. */
static void copy(const struct lazy_read *read, const struct unit *unit)
{
	uint64_t unit_start = unit_extent(unit->source, unit->number).offset;
	uint64_t start = unit_start > read->offset ? unit_start : read->offset;
	uint64_t unit_end = unit_start + unit->length;
	uint64_t end = read->offset + read->length;

	if (end > unit_end)
		end = unit_end;
	memcpy(read->data + (start - read->offset), unit->data + (start - unit_start), end - start);
}

static int wait_for(struct lazy_read *read, struct unit *unit)
{
	struct waiter *waiter = calloc(1, sizeof(*waiter));

	if (!waiter)
		return -ENOMEM;
	waiter->read = read;
	waiter->unit = unit;
	waiter->next_of_read = read->waiters;
	read->waiters = waiter;
	read->units_left++;
	unit_joined(unit, read->deadline_ns);
	list_append(&unit->waiters, &waiter->link);
	return 0;
}

static void deadline_passed(struct timer *timer)
{
	struct lazy_read *read = container_of(timer, struct lazy_read, deadline);
	struct fetcher *fetcher = read->fetcher;

	relaxed_add(&fetcher->counts.deadlines_missed, 1);
	event_log(fetcher, &(struct event){ .name = "deadline_missed", .source = read->source },
		  "%u bytes at %llu did not come in time", read->length,
		  (unsigned long long)read->offset);
	read_end(fetcher, read, -EIO);
	units_admit(fetcher); /* those that waited for memory behind its units */
}

void read_begin(struct fetcher *fetcher, struct lazy_read *read)
{
	const struct source *source = read->source;
	uint64_t number = unit_of(source, read->offset);
	uint64_t last = unit_of(source, read->offset + read->length - 1);
	int err = relaxed_load(&fetcher->abandoned) ? -EIO : 0;

	read->fetcher = fetcher;
	read->waiters = NULL;
	read->units_left = 0;
	read->deadline = (struct timer){ .expire = deadline_passed };
	list_append(&fetcher->reads, &read->link);
	relaxed_add(&fetcher->counts.reads, 1);
	relaxed_add(&fetcher->counts.reads_waiting, 1);
	for (; number <= last && !err; number++) {
		struct unit *unit = unit_get(fetcher, read->source, number, true);

		if (!unit)
			err = -ENOMEM;
		else if (unit_is_right(unit))
			copy(read, unit);
		else
			err = wait_for(read, unit);
	}
	if (err || !read->units_left)
		read_end(fetcher, read, err ? -EIO : 0);
	else if (read->deadline_ns != FETCHER_NO_DEADLINE)
		timer_set(&fetcher->timers, &read->deadline, read->deadline_ns);
	units_admit(fetcher);
}

void unit_deliver(struct unit *unit)
{
	struct link *link;

	while ((link = list_first(&unit->waiters))) {
		struct waiter *waiter = container_of(link, struct waiter, link);
		struct lazy_read *read = waiter->read;

		list_remove(link);
		copy(read, unit);
		if (!--read->units_left)
			read_end(unit->fetcher, read, 0);
	}
}

bool unit_fail_waiters(struct unit *unit, int err)
{
	struct link *link = unit->waiters.next;

	while (link != &unit->waiters) {
		struct waiter *waiter = container_of(link, struct waiter, link);
		struct link *next = link->next;

		/*
		 * A read waits for a unit only once, and ends no other read, so ending it removes no
		 * other waiter from this list.
		 */
		if (waiter->read->deadline_ns != FETCHER_NO_DEADLINE) {
			list_remove(link);
			read_end(unit->fetcher, waiter->read, err);
		}
		link = next;
	}
	return !list_is_empty(&unit->waiters);
}

uint64_t unit_last_deadline_ns(const struct unit *unit)
{
	uint64_t last_ns = 0;

	for (struct link *link = unit->waiters.next; link != &unit->waiters; link = link->next) {
		const struct waiter *waiter = container_of(link, struct waiter, link);

		if (waiter->read->deadline_ns > last_ns)
			last_ns = waiter->read->deadline_ns;
	}
	return last_ns;
}

void reads_fail_all(struct fetcher *fetcher, int err)
{
	struct link *link;

	while ((link = list_first(&fetcher->reads)))
		read_end(fetcher, container_of(link, struct lazy_read, link), err);
}
