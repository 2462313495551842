/* SPDX-License-Identifier: MIT */
#include "lazy/read.h"

#include <errno.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/relaxed.h"
#include "content/layout.h"

/* Takes down the units that a read has waited for, and the one that failed, or NULL. */
static void take_down(const struct lazy_read *read, const struct read_unit *failed)
{
	uint64_t first = unit_of(read->source, read->offset);

	for (unsigned i = 0; i < read->count; i++) {
		const struct read_unit *unit = &read->units[i];

		if (unit == failed || link_is_in_list(&unit->subscription.link))
			missed_add(read->core, read->source, first + i, read->began_ns);
	}
}

/* Zeroes the bytes between the end of the source and the end of its last block. */
static void clear_tail(const struct lazy_read *read)
{
	uint64_t size = read->source->size;
	uint64_t end = read->offset + read->length;

	if (end > size)
		memset(read->data + (size - read->offset), 0, end - size);
}

static void end_read(struct lazy_read *read, int result)
{
	struct fetch_counts *counts = &read->core->counts;

	timer_clear(&read->deadline);
	list_remove(&read->link);
	for (unsigned i = 0; i < read->count; i++)
		subscription_end(&read->units[i].subscription);
	if (read->units != &read->only)
		free(read->units);
	relaxed_add(&counts->reads_waiting, -1);
	if (result) {
		relaxed_add(&counts->read_errors, 1);
		relaxed_store(&counts->failed_source, read->source->id);
	} else {
		clear_tail(read);
	}
	read->done(read, result);
}

/* Whether a unit has all bytes of a read, and that may be answered with the unit's memory. */
static bool is_in_place(const struct lazy_read *read, const struct unit *unit)
{
	return read->in_place && read->count == 1 &&
	       read->offset + read->length <=
		       unit_extent(unit->source, unit->number).offset + unit->length;
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

static void unit_is_right(struct subscription *subscription, const struct unit *unit)
{
	struct lazy_read *read = container_of(subscription, struct read_unit, subscription)->read;

	if (is_in_place(read, unit)) {
		read->found = unit->data +
			      (read->offset - unit_extent(unit->source, unit->number).offset);
	} else {
		copy(read, unit);
		read->found = read->data;
	}
	if (!--read->left)
		end_read(read, 0);
}

static void unit_failed(struct subscription *subscription, int err)
{
	struct read_unit *unit = container_of(subscription, struct read_unit, subscription);
	struct lazy_read *read = unit->read;

	take_down(read, unit);
	end_read(read, err);
}

static const struct subscription_ops read_ops = {
	.right = unit_is_right,
	.failed = unit_failed,
	.urgency = URGENCY_DEMAND,
	.rounds = UINT_MAX,
};

static void deadline_passed(struct timer *timer)
{
	struct lazy_read *read = container_of(timer, struct lazy_read, deadline);

	relaxed_add(&read->core->counts.deadlines_missed, 1);
	event_log(&(struct event){ .name = "deadline_missed", .source = read->source },
		  "%u bytes at %llu did not come in time", read->length,
		  (unsigned long long)read->offset);
	take_down(read, NULL);
	end_read(read, -EIO);
}

static int wait_for_units(struct lazy_read *read)
{
	uint64_t first = unit_of(read->source, read->offset);
	uint64_t last = unit_of(read->source, read->offset + read->length - 1);
	unsigned count = (unsigned)(last - first + 1);

	for (uint64_t number = first; number <= last; number++) {
		if (read->deadline_ns != FETCHER_NO_DEADLINE &&
		    missed_is_recent(read->core, read->source, number, read->began_ns))
			return -EIO;
	}
	read->units = count == 1 ? &read->only : calloc(count, sizeof(*read->units));
	for (; read->units && read->count < count; read->count++) {
		struct read_unit *unit = &read->units[read->count];
		int err;

		unit->read = read;
		unit->subscription = (struct subscription){
			.ops = &read_ops,
			.deadline_ns = read->deadline_ns,
		};
		err = subscribe(read->core, &unit->subscription, read->source, first + read->count);
		if (err)
			return err;
	}
	read->left = count;
	return read->units ? 0 : -ENOMEM;
}

void read_begin(struct core *core, struct lazy_read *read)
{
	read->core = core;
	read->began_ns = clock_now_ns();
	read->units = &read->only;
	read->count = 0;
	read->deadline = (struct timer){ .expire = deadline_passed };
	read->link = (struct link){};
	list_append(&core->reads, &read->link);
	relaxed_add(&core->counts.reads, 1);
	relaxed_add(&core->counts.reads_waiting, 1);
	if (relaxed_load(&core->abandoned) || wait_for_units(read))
		end_read(read, -EIO);
	else if (read->deadline_ns != FETCHER_NO_DEADLINE)
		timer_set(&core->timers, &read->deadline, read->deadline_ns);
}

static void take_read(struct core *core, struct completion *completion)
{
	read_begin(core, container_of(completion, struct lazy_read, sent));
}

void read_send(struct core *core, struct lazy_read *read)
{
	read->sent.take = take_read;
	core_send(core, &read->sent);
}

void reads_fail_all(struct core *core, int err)
{
	struct link *link;

	while ((link = list_first(&core->reads)))
		end_read(container_of(link, struct lazy_read, link), err);
}
