/* SPDX-License-Identifier: MIT */
#include "fetch/kept.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <uv.h>

enum {
	KEPT_MAX_BYTES = 4 << 20, /* of each fetcher */
	KEPT_MS = 10000,
};

struct kept_entry {
	struct link link;
	struct kept_range range;
	uint8_t data[];
};

static uint64_t end_of(const struct kept_range *range)
{
	return range->offset + range->length;
}

static bool is_same_object(const struct kept_range *one, const struct kept_range *other)
{
	return one->source == other->source && one->mirror == other->mirror;
}

static void forget(struct kept *kept, struct kept_entry *entry)
{
	list_remove(&entry->link);
	kept->bytes -= entry->range.length;
	free(entry);
}

static void shrink(struct kept *kept, uint64_t bytes)
{
	while (kept->bytes > bytes)
		forget(kept, container_of(list_first(&kept->entries), struct kept_entry, link));
}

static void on_idle_timeout(uv_timer_t *timer)
{
	shrink(timer->data, 0);
}

static void is_needed(struct kept *kept, struct kept_entry *entry)
{
	list_remove(&entry->link);
	list_append(&kept->entries, &entry->link);
	uv_timer_start(kept->timer, on_idle_timeout, KEPT_MS, 0);
}

void kept_open(struct kept *kept, struct uv_loop_s *loop)
{
	list_init(&kept->entries);
	kept->timer = malloc(sizeof(*kept->timer));
	if (!kept->timer)
		return;
	if (uv_timer_init(loop, kept->timer)) {
		free(kept->timer);
		kept->timer = NULL;
		return;
	}
	kept->timer->data = kept;
}

static void is_closed(uv_handle_t *handle)
{
	struct kept *kept = handle->data;

	free(kept->timer);
	kept->closed(kept);
}

void kept_close(struct kept *kept, void (*closed)(struct kept *kept))
{
	shrink(kept, 0);
	kept->closed = closed;
	if (kept->timer)
		uv_close((uv_handle_t *)kept->timer, is_closed);
	else
		closed(kept);
}

/* Finds the entry that has most from `offset` on; or, with `ends`, up to it. */
static struct kept_entry *find(const struct kept *kept, const struct kept_range *range,
			       uint64_t offset, bool ends)
{
	struct kept_entry *found = NULL;

	list_for_each (struct kept_entry, entry, &kept->entries, link) {
		uint64_t start = entry->range.offset, end = end_of(&entry->range);

		if (!is_same_object(&entry->range, range))
			continue;
		if (ends ? start < offset && end >= offset &&
				    (!found || start < found->range.offset) :
			   start <= offset && end > offset &&
				    (!found || end > end_of(&found->range)))
			found = entry;
	}
	return found;
}

uint32_t kept_beginning(struct kept *kept, const struct kept_range *range, uint8_t *data)
{
	struct kept_entry *entry = find(kept, range, range->offset, false);
	uint64_t skip, bytes;

	if (!entry)
		return 0;
	skip = range->offset - entry->range.offset;
	bytes = entry->range.length - skip;
	if (bytes > range->length)
		bytes = range->length;
	memcpy(data, entry->data + skip, bytes);
	is_needed(kept, entry);
	return (uint32_t)bytes;
}

uint32_t kept_end(struct kept *kept, const struct kept_range *range, uint32_t from, uint8_t *data)
{
	uint64_t end = end_of(range), start = range->offset + from;
	struct kept_entry *entry = find(kept, range, end, true);

	if (!entry)
		return 0;
	if (start < entry->range.offset)
		start = entry->range.offset;
	memcpy(data + (start - range->offset), entry->data + (start - entry->range.offset),
	       end - start);
	is_needed(kept, entry);
	return (uint32_t)(end - start);
}

void kept_add(struct kept *kept, const struct kept_range *range, const uint8_t *data)
{
	struct kept_entry *entry = find(kept, range, range->offset, false);

	if (entry && end_of(&entry->range) >= end_of(range)) {
		is_needed(kept, entry);
		return;
	}
	if (!kept->timer || range->length > KEPT_MAX_BYTES)
		return;
	entry = calloc(1, sizeof(*entry) + range->length);
	if (!entry)
		return;
	shrink(kept, KEPT_MAX_BYTES - range->length);
	entry->range = *range;
	memcpy(entry->data, data, range->length);
	kept->bytes += range->length;
	is_needed(kept, entry);
}

void kept_drop(struct kept *kept, const struct kept_range *range)
{
	struct link *link, *next;

	for (link = kept->entries.next; link != &kept->entries; link = next) {
		struct kept_entry *entry = container_of(link, struct kept_entry, link);

		next = link->next;
		if (is_same_object(&entry->range, range) && end_of(&entry->range) > range->offset &&
		    entry->range.offset < end_of(range))
			forget(kept, entry);
	}
}
