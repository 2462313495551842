/* SPDX-License-Identifier: MIT */
/*
 * Units whose readers missed their deadline. For one read of a file, the kernel may ask for the same
 * block up to four times, each time within milliseconds of the error before: to read ahead, for the
 * page itself (filemap_read()), and both again for a page fault. A reader waits for one deadline,
 * not for four: for a moment, such a unit fails at once.
 */
#include "content/cache.h"
#include "lazy/core.h"

#define REPEAT_NS (250 * NS_PER_MS)

static bool is_there(struct core *core, const struct source *source, uint64_t number)
{
	const struct unit *unit = unit_find(core, source, number);

	return (unit && unit->state == UNIT_VERIFIED) ||
	       cache_has_unit(source, number); /* by another process, perhaps */
}

void missed_add(struct core *core, const struct source *source, uint64_t number, uint64_t since_ns)
{
	uint64_t now_ns = clock_now_ns();

	if (now_ns - since_ns < REPEAT_NS)
		return; /* little was waited for: it may be tried again */
	core->missed_until_ns = now_ns + REPEAT_NS;
	core->missed[core->missed_next] = (struct missed){
		.source = source,
		.number = number,
		.until_ns = core->missed_until_ns,
	};
	core->missed_next = (core->missed_next + 1) % MISSED_MAX;
}

bool missed_is_recent(struct core *core, const struct source *source, uint64_t number,
		      uint64_t now_ns)
{
	if (now_ns >= core->missed_until_ns)
		return false;
	for (unsigned i = 0; i < MISSED_MAX; i++) {
		const struct missed *missed = &core->missed[i];

		if (missed->source == source && missed->number == number &&
		    now_ns < missed->until_ns)
			return !is_there(core, source, number);
	}
	return false;
}

void missed_forget(const struct unit *unit)
{
	if (clock_now_ns() >= unit->core->missed_until_ns)
		return;
	for (unsigned i = 0; i < MISSED_MAX; i++) {
		struct missed *missed = &unit->core->missed[i];

		if (missed->source == unit->source && missed->number == unit->number)
			missed->until_ns = 0;
	}
}
